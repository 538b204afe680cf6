"""Real processes over gloo: what they train is the same whoever was killed and whoever reads it."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

SCRIPT = Path(__file__).parents[1] / "support/training_hosts_run.py"
REPOSITORY = Path(__file__).parents[2]
TWO_BY_FOUR, FOUR_BY_TWO = (2, 4, "data=4,model=2"), (4, 2, "data=2,model=4")
STEPS = 6


@contextmanager
def job(directory, processes, devices, mesh):
    """The small run under `toolkit launch`; its processes end with it, whatever happens."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(REPOSITORY), str(SCRIPT.parent))),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    command = [sys.executable, str(SCRIPT), str(directory), mesh, str(STEPS)]
    if processes > 1:
        cli = [sys.executable, "-m", "toolkit.cli", "launch", "--processes", str(processes)]
        command = [*cli, "--devices", str(devices), "--", *command]
    process = subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def said(directory, *layout):
    with job(directory, *layout) as process:
        output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return [line for line in output.splitlines() if line.startswith(("restored", "sha256"))]


@pytest.mark.parametrize(
    "readers",
    [
        pytest.param([(1, 8, "data=8")], marks=pytest.mark.slow),
        pytest.param([FOUR_BY_TWO, (1, 8, "data=8"), (1, 1, "data=1")], marks=pytest.mark.nightly),
    ],
)
def test_kills_and_meshes_change_no_bit(readers, tmp_path):
    """Two processes of four devices: one run left alone, and one with a process killed."""
    started = time.monotonic()
    (undisturbed,) = said(tmp_path / "undisturbed", *TWO_BY_FOUR)
    with job(tmp_path / "killed", *TWO_BY_FOUR) as process:
        while "training" not in process.stdout.readline():
            assert process.poll() is None, process.communicate()[1]
        _, second = sorted(psutil.Process(process.pid).children(), key=lambda it: it.create_time())
        second.kill()
        killed = time.monotonic()
        _, errors = process.communicate(timeout=300)
        # jax itself would notice after a minute and a half.
        assert time.monotonic() - killed < killed - started
    assert process.returncode == 2
    last = errors.splitlines()[-1]
    # A progress bar may have begun the line.
    assert "toolkit: process 1 of 2 was killed by SIGKILL; the others were ended." in last
    assert said(tmp_path / "killed", *TWO_BY_FOUR)[-1] == undisturbed
    # What the mesh 4 x 2 wrote is read by 2 x 4 in four processes, by 8 and by 1 in one.
    restored = f"restored {STEPS} {undisturbed.split()[1]}"
    for layout in readers:
        assert said(tmp_path / "killed", *layout)[0] == restored


def test_processes_end_with_the_one_that_watches_them():
    code = "from toolkit.parallel.processes import _die_with_supervisor as d; d()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        process.stdin.close()
        assert process.wait(30) == 1
