"""The command `toolkit`, one function per subcommand.

The arguments of a function are the flags of its command (read by tyro). It checks them and calls
the package; expected errors are shown in one or two lines instead of a traceback (unless
TOOLKIT_TRACEBACK=1).
"""

import os
import sys
from pathlib import Path
from typing import Annotated

import tyro

from toolkit._same_name import hidden, hiding
from toolkit.cli.cluster import explain, launch, plan
from toolkit.cli.collectives import plan_collective
from toolkit.cli.compare import compare
from toolkit.cli.language import enable_compilation_cache as _enable_compilation_cache
from toolkit.cli.language import evaluate, export, generate, serve
from toolkit.cli.results import bench, eject, experiment
from toolkit.cli.site import export_site
from toolkit.cli.sparse import audit_sparse
from toolkit.cli.train import train, train_command
from toolkit.parallel.hosts.processes import leave


def tour(
    directory: Path = Path("runs/tour"),
    fresh: bool = False,
    steps: int = 160,
    text: Annotated[tuple[Path, ...], tyro.conf.UseAppendAction] = (),
) -> None:
    """Train, compare and report on this machine in two to three minutes; writes one HTML page.

    Args:
        directory: folder for checkpoints, numbers and `index.html`.
        fresh: start over instead of resuming an interrupted tour.
        steps: training steps of each of the three models.
        text: a file or folder to train on instead of the language manual (repeatable).
    """
    from toolkit.lab import run_tour
    from toolkit.lab.tour.tour import BATCH
    from toolkit.language.cores import run_cores
    from toolkit.parallel import use_cores

    cores = use_cores(run_cores(directory / "plain", BATCH))
    page = run_tour(directory, steps=steps, text=text, fresh=fresh, cores=cores)
    print(f"\nThe tour is written: {page}")
    print("Open it in a browser. Go on with:  toolkit lab")


def lab(
    port: int = 8888, browser: bool = True, workspace: Path = Path("toolkit-notebooks")
) -> None:
    """Open JupyterLab on an index of instruments and lessons, with your progress.

    Args:
        port: the port to listen on (localhost only).
        browser: open a browser window.
        workspace: your copies of the notebooks and lessons, which are made if missing and never
            overwritten.
    """
    from toolkit.lab.notebooks.server import serve

    sys.exit(serve(port=port, browser=browser, workspace=workspace))


def gather(folder: Annotated[Path, tyro.conf.Positional]) -> None:
    """Write one page about a class of learners: their progress and their guesses.

    Args:
        folder: folder of pages that learners exported with `lesson.export()`.
    """
    from toolkit.lab import gather

    print(f"The room: {gather(folder)}")


def room(folder: Annotated[Path, tyro.conf.Positional] = Path("room"), port: int = 8123) -> None:
    """Show a class live on a page of this machine; learners hand in over the network.

    Args:
        folder: where the learners' progress is kept; files that they bring may lie there too.
        port: the port to listen on.
    """
    from toolkit.lab import Room

    with Room(folder, port=port) as room:
        print(f"Learners enter as Room, in the last box of a lesson:  {room.address}")
        print(f"You open, on this machine:  {room.page_address}   (Ctrl+C ends)", flush=True)
        try:
            room.serve_forever()
        except KeyboardInterrupt:
            print(f"\nKept in {folder}; show it again:  toolkit gather {folder}")


def info() -> None:
    """Print versions, devices and memory, for a bug report, and which `toolkit` is imported."""
    from toolkit.measure import environment_rows

    for name, text in environment_rows():
        print(f"{name:<12} {text}")
    for text in filter(None, (hidden(), hiding())):
        print(f"{'same name':<12} {text}")


_FUNCTIONS = (
    tour,
    lab,
    gather,
    room,
    export_site,
    train,
    compare,
    launch,
    generate,
    serve,
    evaluate,
    export,
    plan,
    plan_collective,
    explain,
    bench,
    audit_sparse,
    experiment,
    eject,
    info,
)
COMMANDS = {function.__name__.replace("_", "-"): function for function in _FUNCTIONS}


def main() -> None:
    """Entry point of the command `toolkit`; exit status 2 for an expected error.

    Raises:
        SystemExit: with 2 after an expected error, with 130 after Ctrl-C, with 141 when the output
            pipe is closed.
    """
    _enable_compilation_cache()
    try:
        # The flags of training come from its dataclasses, whose import takes a second.
        typed = {"train": train_command()} if sys.argv[1:2] == ["train"] else {}
        tyro.extras.subcommand_cli_from_dict(
            COMMANDS | typed,
            prog="toolkit",
            description="The ideas that make large models fast: read, run, measure, move a slider.",
        )
    except KeyboardInterrupt:
        print("\nstopped; run the same command again to go on", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (ValueError, OSError, RuntimeError, ArithmeticError, ImportError) as error:
        if os.environ.get("TOOLKIT_TRACEBACK"):
            raise
        print(f"toolkit: {error}", file=sys.stderr)
        leave(2)
