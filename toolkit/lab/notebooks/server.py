"""JupyterLab on notebooks and lessons: what `toolkit lab` starts."""

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
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
    return subprocess.run(command, check=False, env=kernel_environment(os.environ)).returncode
