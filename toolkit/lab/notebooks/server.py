"""JupyterLab on notebooks and lessons: what `toolkit lab` starts."""

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from toolkit.lab.kit.stored import stored_folder
from toolkit.lab.notebooks.index import write_index


def serve(*, port: int = 8888, browser: bool = True) -> int:
    """Start JupyterLab on the index of notebooks and lessons and wait until it ends.

    An installed wheel may be read-only and is overwritten by the next upgrade, so there both are
    first copied to `toolkit-notebooks` in the current folder; a copy that exists is the user's own
    text and is left alone.
    """
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
    root = stored_folder("notebooks").parent  # a checkout: lessons lie beside
    if (root / "_notebooks").is_dir():
        root = Path("toolkit-notebooks")
        for name in ("notebooks", "tutorials"):
            if not (root / name).exists():
                shutil.copytree(stored_folder(name), root / name)
    write_index(root)
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
    return subprocess.run(command, check=False).returncode
