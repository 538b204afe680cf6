"""The command `toolkit`, one function per subcommand.

The arguments of a function are the flags of its command (read by tyro). It checks them and calls
the package; expected errors are shown in one or two lines instead of a traceback (unless
TOOLKIT_TRACEBACK=1).
"""

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from toolkit.cli_cluster import explain, launch, plan
from toolkit.cli_results import bench, eject, experiment
from toolkit.cli_site import export_site
from toolkit.cli_sparse import audit_sparse
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


def train(
    directory: Annotated[Path, tyro.conf.Positional],
    pattern: str = "gdn gdn gdn full",
    feed_forwards: str = "swiglu",
    loops: int = 2,
    width: int = 128,
    heads: int = 4,
    sliding_window: int = 64,
    attention_output_gate: bool = False,
    balance: float = 0.01,
    steps: int = 1000,
    batch: int = 16,
    sequence_length: int = 256,
    learning_rate: float | Literal["search"] = 3e-3,
    dtype: Literal["float32", "bfloat16"] = "float32",
    text: Annotated[tuple[Path, ...], tyro.conf.UseAppendAction] = (),
    corpus: Literal["prose", "code"] = "prose",
    seed: int = 0,
    layout: str = "single",
    tensor_devices: int = 1,
    context_devices: int = 1,
    loss_chunks: int = 1,
    block_chunks: int = 1,
    simulated_devices: int = 1,
    cores: int | None = None,
    checkpoint_every: int | None = None,
    checkpoint_minutes: float | None = None,
    processes: int | None = None,
    profile: str | None = None,
    vocabulary: int = 256,
    tokenizer: Path | None = None,
) -> None:
    """Train a looped language model on text; run again to resume.

    Args:
        directory: the run's folder: checkpoints, metrics.jsonl and config.json.
        pattern: the physical layers in order, e.g. "gdn gdn gdn full".
        feed_forwards: "swiglu", "moe" (a mixture of 8 experts, of which a token passes 2), or one
            of them per layer.
        loops: how many times the stack of layers is applied.
        width: the width of the residual stream.
        heads: attention heads.
        sliding_window: bytes a "window" layer sees.
        attention_output_gate: gate the outputs of the heads of "full" and "window" layers.
        balance: weight of the loss that evens the loads of experts.
        steps: total training steps, including those of a search's candidates.
        batch: sequences per step.
        sequence_length: bytes per sequence.
        learning_rate: peak rate of the warm-up and cosine schedule; or "search", to find a
            schedule while training.
        dtype: the precision of activations; parameters stay float32.
        text: a file or folder to train on (repeatable), or one token array (.npy).
        corpus: the text used when none is given: the language manual's prose or the
            standard library's source.
        seed: seed of the initialisation and of the order of the data.
        layout: "single" device; or all of them: "data" parallel, "zero1", "zero2", "zero3" (fully
            sharded), "tensor", "ring", "zigzag" or "ulysses" (these shard time), or two joined by
            "+".
        tensor_devices: devices that share the heads and hidden sizes under "tensor".
        context_devices: devices that share each sequence under "ring", "zigzag" or "ulysses".
        loss_chunks: parts of each sequence whose logits are computed one after the other: less
            memory.
        block_chunks: pieces of each sequence in the backward pass of every layer: less memory, a
            third more work.
        simulated_devices: number of simulated CPU devices, to try a layout out.
        cores: cores of a CPU that share every batch; by default those of a resumed run, or the
            largest available number that divides the batch.
        checkpoint_every: steps between checkpoints; by default an eighth of the run.
        checkpoint_minutes: also save when so many minutes have passed since the last checkpoint.
        processes: number of processes that the cluster's launcher starts; not needed under `toolkit
            launch`.
        profile: trace the updates between two steps, as in 10:13, into the run's folder; open the
            trace with `xprof` or at ui.perfetto.dev.
        vocabulary: number of tokens, if they are not bytes.
        tokenizer: the tokenizer.json of a token array; by default the one that
            `toolkit.language.write_tokens` wrote beside the array.
    """
    from toolkit.language.cores import run_cores
    from toolkit.parallel import join_processes, simulate_devices, use_cores

    shared = 1
    if simulated_devices != 1:
        simulate_devices(simulated_devices)
    count = join_processes(processes)
    if count > 1:
        _enable_compilation_cache(directory / "programs")  # which all hosts see
    elif simulated_devices == 1 and layout == "single":
        shared = use_cores(run_cores(directory, batch) if cores is None else cores)
    import jax

    from toolkit.language import TrainingRun, load_tokenizer, train_language_model
    from toolkit.looped import LoopedConfig
    from toolkit.training.profile import parsed_steps

    config = LoopedConfig.tiny(
        pattern=pattern,
        feed_forwards=feed_forwards,
        loops=loops,
        width=width,
        heads=heads,
        options={
            "full": {"output_gate": attention_output_gate},
            "window": {
                "output_gate": attention_output_gate,
                "sliding_window": sliding_window,
            },
        },
        dtype=dtype,
        vocabulary=vocabulary,
    )
    run = TrainingRun(
        config=config,
        text=tuple(str(path) for path in text) or corpus,
        steps=steps,
        batch=batch,
        sequence_length=sequence_length,
        learning_rate=learning_rate,
        balance=balance,
        seed=seed,
        layout=layout,
        tensor_devices=tensor_devices,
        context_devices=context_devices,
        loss_chunks=loss_chunks,
        block_chunks=block_chunks,
        cores=shared,
    )
    result = train_language_model(
        run,
        directory,
        tokenizer=None if tokenizer is None else load_tokenizer(tokenizer),
        checkpoint_every=checkpoint_every,
        checkpoint_minutes=checkpoint_minutes,
        profile=parsed_steps(profile),
    )
    if result.stopped_by is not None:
        sys.exit(130)  # what was saved, and how to go on, has been said
    if jax.process_index():
        return
    print(f"\nheld-out loss {result.loss_in_words} after {result.step} steps")
    if result.bytes_per_token is not None:
        print(f'Go on with:  toolkit generate {directory} --prompt "The "')
    else:
        print(f"Go on with:  toolkit generate {directory} --tokenizer FILE")


def generate(
    directory: Annotated[Path, tyro.conf.Positional],
    prompt: str = "The ",
    length: int = 256,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    tokenizer: Path | None = None,
) -> None:
    """Continue a prompt with a model trained by `toolkit train` or by the tour.

    Args:
        directory: the run's folder, or a file written by `toolkit export`.
        prompt: the text to continue.
        length: number of bytes, or tokens, to write.
        temperature: 0 for the likeliest byte every time.
        top_k: sample among the k likeliest bytes only.
        top_p: sample among the likeliest bytes with this share of the probability.
        seed: seed of the sampling.
        tokenizer: the model's tokenizer.json; by default the one stored with it.
    """
    from toolkit.language import find_tokenizer, load_language_model, load_tokenizer, stream_text

    model = load_language_model(directory)
    known = find_tokenizer(directory) if tokenizer is None else load_tokenizer(tokenizer)
    how = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    pieces = stream_text(model, prompt, length, tokenizer=known, **how)
    print(prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()


def export(
    directory: Annotated[Path, tyro.conf.Positional],
    file: Annotated[Path, tyro.conf.Positional],
    dtype: Literal["float32", "float16", "bfloat16"] = "float16",
) -> None:
    """Write a trained model to one file, with the record of its training beside it.

    Args:
        directory: the run's folder.
        file: the file to write, ending in .safetensors.
        dtype: type of the stored numbers.
    """
    from toolkit.language import export_language_model

    path, record = export_language_model(directory, file, dtype=dtype)
    print(f"{path}: {path.stat().st_size:,} bytes; its record: {record}")
    print(f'Go on with:  toolkit generate {path} --prompt "The "')


def info() -> None:
    """Print versions, devices and memory, for a bug report."""
    from toolkit.measure import environment_rows

    for name, text in environment_rows():
        print(f"{name:<12} {text}")


def _enable_compilation_cache(folder: Path | None = None) -> None:
    # A second run of the same command starts in a quarter of the time.
    import jax

    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    jax.config.update("jax_compilation_cache_dir", str(folder or home / "mlsys-toolkit" / "xla"))


_FUNCTIONS = (
    tour,
    lab,
    gather,
    export_site,
    train,
    launch,
    generate,
    export,
    plan,
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
        tyro.extras.subcommand_cli_from_dict(
            COMMANDS,
            prog="toolkit",
            description="The ideas that make large models fast: read, run, measure, move a slider.",
        )
    except KeyboardInterrupt:
        print("\nstopped; run the same command again to go on", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (ValueError, OSError, RuntimeError, ArithmeticError) as error:
        if os.environ.get("TOOLKIT_TRACEBACK"):
            raise
        print(f"toolkit: {error}", file=sys.stderr)
        leave(2)


if __name__ == "__main__":
    main()
