"""JupyterLab on a random port with all its state in one folder: nothing of the user's leaks in."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

START_SECONDS = 200


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def jupyterlab(notebooks: Path, state: Path, import_path: Path) -> Iterator[str]:
    """Serve a folder of notebooks; yields the address, ends the server and its kernels on exit."""
    port = free_port()
    folders = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "IPYTHONDIR": "ipython",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
    }
    environment = os.environ | {name: str(state / folder) for name, folder in folders.items()}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment["PYTHONPATH"] = str(import_path)
    # The question whether to fetch news would cover the notebook.
    settings = state / "settings/@jupyterlab/apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text(
        '{"fetchNews": "false", "checkForUpdates": false}'
    )
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1"),
        *(f"--port={port}", "--ServerApp.port_retries=0", "--IdentityProvider.token="),
        *("--ServerApp.password=", f"--ServerApp.root_dir={notebooks}"),
        *("--LabApp.expose_app_in_browser=True", "--LabApp.extension_manager=readonly"),
    ]
    log = state / "server.log"
    with log.open("w") as sink:
        server = subprocess.Popen(
            command, env=environment, stdout=sink, stderr=sink, start_new_session=True
        )
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(f"{address}/api/status", server, log)
        yield address
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(10)


def _wait_until_ready(address: str, server: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"JupyterLab ended with {server.returncode}:\n{log.read_text()}")
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(address, timeout=2).close()
            return
        time.sleep(0.2)
    raise TimeoutError(f"JupyterLab gave no answer in {START_SECONDS} s:\n{log.read_text()}")
