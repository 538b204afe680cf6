"""JupyterLab on notebooks and lessons: what `toolkit lab` starts."""

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from toolkit.lab.notebooks.index import FOLDERS, write_index
from toolkit.measure.stored import stored_folder


def make_workspace(root: Path) -> Path:
    """Copy the notebooks and lessons that a folder does not have yet, and write their index.

    JupyterLab saves what a learner types into the files it opens, so it never opens those of the
    package or of a checkout. A file that exists is the learner's own and is left alone.
    """
    for name in FOLDERS:
        (root / name).mkdir(parents=True, exist_ok=True)
        for source in sorted(stored_folder(name).glob("*.ipynb")):
            if not (copy := root / name / source.name).exists():
                shutil.copyfile(source, copy)
    write_index(root)
    return root


def kernel_environment(own: Mapping[str, str]) -> dict[str, str]:
    """That of the kernels: programs that a panel keeps are the next session's, in a folder.

    All others are compiled anew, since collectives of a loaded program can meet on CPUs.
    """
    if "JAX_COMPILATION_CACHE_DIR" in own:
        return dict(own)
    home = Path(own.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return {
        **own,
        "JAX_COMPILATION_CACHE_DIR": str(home / "mlsys-toolkit" / "lab"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "inf",
    }


# What the panels of sparse decoding compile, in the order in which a learner meets it.
_AHEAD = """
import os
os.nice(19)
from toolkit.lab.sparsity.drop import drop_view
from toolkit.lab.sparsity.reading import CONTEXTS, SYSTEMS
shown = {"budget": 128, "layer": 1, "head": 1, "question": 1}
for context in CONTEXTS:
    for system in SYSTEMS:
        drop_view(system=system, context=context, **shown)
"""


@contextmanager
def compiling_ahead(environment: Mapping[str, str]) -> Iterator[subprocess.Popen | None]:
    """Fill the folder of programs, if there is none yet, by a process that ends with the session.

    A first session would otherwise compile while its learner waits for each system. The process has
    the least priority and uses CPUs only, so that it takes nothing from the kernels.
    """
    if Path(environment["JAX_COMPILATION_CACHE_DIR"]).exists():
        yield None
        return
    process = subprocess.Popen(
        [sys.executable, "-c", _AHEAD], env={**environment, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def serve(*, port: int = 8888, browser: bool = True, workspace: Path) -> int:
    """Start JupyterLab on the index of a workspace and wait until it ends."""
    if importlib.util.find_spec("jupyterlab") is None:
        raise RuntimeError(
            "JupyterLab is not installed; "
            "install it with: python -m pip install 'mlsys-toolkit[lab]'"
        )
    if not 0 < port < 65536:
        raise ValueError(f"port: got {port}, wanted a number from 1 to 65535")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise OSError(
                f"port: {port} cannot be used ({error.strerror}); "
                f"choose another, e.g. toolkit lab --port {port % 65535 + 1}"
            ) from None
    root = make_workspace(workspace)
    command = [
        sys.executable, "-m", "jupyterlab", f"--port={port}", "--ServerApp.port_retries=0",
        "--ServerApp.ip=127.0.0.1", f"--ServerApp.root_dir={root.resolve()}",
        "--LabApp.default_url=/lab/tree/index.ipynb",
    ]  # fmt: skip
    if not browser:
        command.append("--no-browser")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        # Containers often run as root, which JupyterLab refuses by default.
        command.append("--allow-root")
    environment = kernel_environment(os.environ)
    with compiling_ahead(environment):
        return subprocess.run(command, check=False, env=environment).returncode
