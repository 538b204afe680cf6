"""One job of several processes: watched, ended when one dies, found by each other, counted."""

import os
import signal
import subprocess
import sys

import pytest

from toolkit.parallel import join_processes, launch
from toolkit.parallel.hosts.launch import launch_commands

A_LONG_TIME = 3600  # seconds; pytest's limit ends a test that waits for it
TRAIN = ["toolkit", "train", "a run", "--layout", "zero3"]
# Each process writes its number into a folder, and then behaves as its number says.
BEHAVE = """
import os, pathlib, signal, sys, time
index = os.environ["JAX_PROCESS_ID"]
pathlib.Path(sys.argv[1], index).write_text(str(os.getpid()))
exec(dict(pair.split("=", 1) for pair in sys.argv[2:]).get(index, "pass"))
"""


# The others have started.
TOGETHER = """
while sum(path.stat().st_size > 0 for path in pathlib.Path(sys.argv[1]).iterdir()) < 3:
    time.sleep(0.01)
"""


def start(folder, *behaviour, **options):
    return launch([sys.executable, "-c", BEHAVE, str(folder), *behaviour], **options)


def is_alive(folder, index):
    try:
        os.kill(int((folder / str(index)).read_text()), 0)
    except ProcessLookupError:
        return False
    return True


def test_every_process_runs_and_knows_its_number(tmp_path):
    assert start(tmp_path, processes=3) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", ("process 1", "SIGKILL")),
        ("sys.exit(3)", ("process 1", "status 3")),
    ],
)
def test_one_that_dies_ends_the_job(tmp_path, behaviour, words):
    first, last = (f"{index}=time.sleep({A_LONG_TIME})" for index in (0, 2))
    with pytest.raises(RuntimeError) as error:
        start(
            tmp_path, first, f"1={TOGETHER}{behaviour}", last, processes=3,
            grace_seconds=A_LONG_TIME,
        )  # fmt: skip
    assert all(word in str(error.value) for word in (*words, "of 3", "last one"))
    assert "\n" not in str(error.value)
    assert not is_alive(tmp_path, 0)
    assert not is_alive(tmp_path, 2)


def test_a_killed_process_is_blamed_before_those_that_failed_without_it(tmp_path):
    noticed = f"0={TOGETHER}sys.exit(1)"
    killed = f"1={TOGETHER}time.sleep(0.2); os.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(RuntimeError, match="process 1 of 3 was killed by SIGKILL"):
        start(tmp_path, noticed, killed, f"2={TOGETHER}os.abort()", processes=3)


def test_a_job_starts_again_as_often_as_allowed(tmp_path, capsys):
    failed = f"p = pathlib.Path({str(tmp_path)!r}, 'failed')"
    once = f"1={failed}; was = p.exists(); p.touch(); sys.exit(not was)"
    assert start(tmp_path, once, restarts=1) == 0
    assert "process 1 of 2 ended with status 1; starting again (1 of 1)" in capsys.readouterr().err


def test_a_job_that_starts_again_has_half_as_many_processes(tmp_path):
    told = tmp_path / "told"
    code = (
        "import os, sys, time\n"
        "if os.environ['JAX_PROCESS_ID'] != '0': time.sleep(60)\n"
        f"print(os.environ['JAX_NUM_PROCESSES'], file=open({str(told)!r}, 'a'))\n"
        "sys.exit(1)"
    )
    with pytest.raises(RuntimeError, match="process 0 of 2"):
        launch([sys.executable, "-c", code], processes=5, restarts=2, fewest=2)
    assert told.read_text().split() == ["5", "2", "2"]


def test_a_request_to_stop_is_handed_on(tmp_path):
    """As SIGTERM, whatever it was; and what the processes end with is the job's status."""
    wait = f"time.sleep({A_LONG_TIME})"
    handle = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(130)); print('ready', flush=True)"
    command = [
        sys.executable,
        "-c",
        BEHAVE,
        str(tmp_path),
        f"0={handle}; {wait}",
        f"1={handle}; {wait}",
    ]
    code = f"from toolkit.parallel import launch; import sys; sys.exit(launch({command!r}))"
    job = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        job.stdout.readline()
        while b"ready" not in job.stderr.readline():
            pass
        job.send_signal(signal.SIGINT)
        assert job.wait(A_LONG_TIME // 10) == 130
    finally:
        job.kill()
        job.communicate()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"command": []}, "command"),
        ({"command": ["no such program"]}, "no such program"),
        ({"command": ["true"], "processes": 0}, "processes"),
        ({"command": ["true"], "processes": 10**12}, "processes"),
        ({"command": ["true"], "devices": 0}, "devices"),
        ({"command": ["true"], "restarts": -1}, "restarts"),
        ({"command": ["true"], "fewest": 3}, "fewest"),
        ({"command": ["true"], "grace_seconds": -1.0}, "grace_seconds"),
    ],
)
def test_what_cannot_be_launched_is_refused(arguments, word):
    with pytest.raises(ValueError, match=word):
        launch(**arguments)


def test_a_dry_run_says_what_each_process_is_told():
    first, second = launch_commands(TRAIN, 2, 4).splitlines()
    assert first.endswith("toolkit train 'a run' --layout zero3")
    for line, index in ((first, 0), (second, 1)):
        assert f"JAX_NUM_PROCESSES=2 JAX_PROCESS_ID={index}" in line
        assert "JAX_NUM_CPU_DEVICES=4" in line


def test_processes_are_counted(monkeypatch):
    assert join_processes() == join_processes(1) == 1
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    with pytest.raises(ValueError, match=r"has 2 process\(es\), wanted 4"):
        join_processes(4)
    with pytest.raises(ValueError, match="expected"):
        join_processes(0)
