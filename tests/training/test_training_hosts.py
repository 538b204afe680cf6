"""Real processes over gloo: what they train is the same whoever was killed and whoever reads it."""

import os
import shutil
import signal
import socket
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
        "TMPDIR": str(directory.parent),  # where a failed job leaves what libraries wrote
    }
    command = [sys.executable, str(SCRIPT), str(directory), mesh, str(STEPS)]
    if processes > 1:
        cli = [sys.executable, "-m", "toolkit", "launch", "--processes", str(processes)]
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


@pytest.mark.nightly
def test_kills_and_meshes_change_no_bit(tmp_path):
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
    for layout in (FOUR_BY_TWO, (1, 8, "data=8"), (1, 1, "data=1")):
        assert said(tmp_path / "killed", *layout)[0] == restored


def test_processes_end_with_the_one_that_watches_them():
    code = "from toolkit.parallel.hosts.processes import _die_with_supervisor as d; d()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        process.stdin.close()
        assert process.wait(30) == 1


def test_a_process_that_waits_for_others_ends_with_its_launcher():
    """A launcher that was killed between its processes leaves none of them waiting."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    job = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "2"}
    job |= {"JAX_PROCESS_ID": "0", "TOOLKIT_SUPERVISED": "1", "PYTHONPATH": str(REPOSITORY)}
    code = "from toolkit.parallel import join_processes; join_processes()"
    with subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | job, stdin=subprocess.PIPE
    ) as process:
        process.stdin.close()
        assert process.wait(60) == 1


# gloo gives a program's first collective 30 s to connect all processes.
LONGER_THAN_GLOO_WAITS = 36
# The second process stops itself while its train step is compiled.
SLOW_TO_COMPILE = """
import os, signal, sys
import jax, jax.numpy as jnp
from toolkit import parallel, training

parallel.join_processes()
mesh = parallel.make_mesh({"data": 4})
params = {"w": jnp.ones(8)}
layout = parallel.layout(params, mesh, "zero3", min_elements=0)

def loss(params, batch):
    if jax.process_index() == 1 and not os.path.exists(sys.argv[1]):
        open(sys.argv[1], "w").write(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    return jnp.mean((batch - params["w"]) ** 2)

optimizer = training.adamw(0.1)
state = training.TrainState.create(layout.apply(params), optimizer)
step = training.make_train_step(loss, optimizer)
batch = layout.apply_batch(jnp.zeros((4, 8)))
state, metrics = step(state, batch)
print("trained", float(metrics["loss"][0]), flush=True)
"""


def launched(code, *arguments):
    command = [sys.executable, "-m", "toolkit", "launch", "--processes", "2", "--devices", "2"]
    return subprocess.Popen(
        [*command, "--", sys.executable, "-c", code, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.nightly
def test_a_host_that_compiles_slowly_is_waited_for_and_named(tmp_path):
    stopped = tmp_path / "stopped"
    with launched(SLOW_TO_COMPILE, stopped) as process:
        try:
            while not stopped.exists() or not stopped.read_text():
                assert process.poll() is None, process.communicate()[1]
                time.sleep(0.1)
            time.sleep(LONGER_THAN_GLOO_WAITS)
            os.kill(int(stopped.read_text()), signal.SIGCONT)
            output, errors = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    assert "trained 1.0" in output
    host = socket.gethostname()
    assert f"waiting for process 1 (host {host}) of 2 to compile the train step" in errors
    assert "Gloo" not in output + errors  # that is in the log


@pytest.mark.nightly
def test_programs_lie_where_every_host_finds_them(tmp_path):
    launch = ["launch", "--processes", "2", "--devices", "2", "--"]
    sizes = ["--pattern", "full", "--width", "16", "--heads", "2", "--sequence-length", "16"]
    train = ["train", str(tmp_path), "--layout", "data", "--steps", "10", "--batch", "4"]
    cli = [sys.executable, "-m", "toolkit"]
    ended = subprocess.run(
        [*cli, *launch, *cli, *train, *sizes],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    names = {path.name.split("-")[0] for path in (tmp_path / "programs").iterdir()}
    assert "jit_run_updates" in names
    assert "Gloo" not in ended.stdout + ended.stderr


LATE = """
import os, sys, time
import jax, numpy as np
from jax.experimental import multihost_utils
from toolkit.parallel import join_processes
from toolkit.parallel.hosts.meeting import meet

join_processes()
multihost_utils.process_allgather(np.ones(1))
os.write(1, b"words of a library")
meet("be early")
if jax.process_index() == 1:
    time.sleep(float(sys.argv[1]))
meet("be there", seconds=1)
"""


def test_a_host_that_is_late_is_named_and_libraries_write_elsewhere():
    with launched(LATE, 60) as process:
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    host = socket.gethostname()
    wanted = f"RuntimeError: waited 1 s for process 1 (host {host}) of 2 to be there"
    assert wanted in errors
    last = errors.splitlines()[-1]
    assert "process 0 of 2 ended with status 1" in last
    assert "Gloo" not in output + errors
    assert "words of a library" not in output + errors
    first, _ = sorted(Path(last.rsplit(" ", 1)[1].rstrip(".")).iterdir())
    assert "words of a library" in first.read_text()
    shutil.rmtree(first.parent)


# A launcher that ends a job with its first process must not meet one that is still saving.
SAVES_LATE = """
import pathlib, sys, time
import jax
from toolkit.parallel import join_processes
from toolkit.training.loop import say_if_stopped

join_processes()
saved = pathlib.Path(sys.argv[1])
if jax.process_index() == 1:
    time.sleep(2)
    saved.touch()
say_if_stopped("SIGTERM", "step 1", None)
sys.exit(not saved.exists())
"""


@pytest.mark.slow
def test_no_process_leaves_before_all_have_saved(tmp_path):
    with launched(SAVES_LATE, tmp_path / "saved") as process:
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors


def test_a_port_in_use_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        job = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "2"}
        code = "from toolkit.parallel import join_processes; join_processes()"
        ended = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | job | {"JAX_PROCESS_ID": "0", "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
        )
    assert ended.returncode == 1, ended
    last = ended.stderr.splitlines()[-1]
    assert f"cannot join the other processes (port {port} of this host: " in last
    assert "in use" in last
