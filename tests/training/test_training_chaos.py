"""Real jobs over gloo: kills, stopped hosts, Ctrl-C, full disks and other meshes change no result.

`python tests/support/chaos.py 100` is the nightly test by itself, and prints its counts.
"""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import chaos
import pytest

STEPS = 24
LOSS_TOLERANCE = 1e-5


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(10, marks=pytest.mark.slow),
        pytest.param(100, marks=[pytest.mark.nightly, pytest.mark.timeout(7200)]),
    ],
)
def test_kills_change_no_bit(tmp_path, kills):
    """Of workers, coordinators and launchers, at random moments."""
    assert chaos.killed_runs(tmp_path, kills).total() == kills


@pytest.mark.nightly
def test_stopped_hosts_and_ctrl_c_change_no_bit(tmp_path):
    """A host that stands still for seconds, one that is asked to stop, one that is told twice."""
    programs, chance = tmp_path / "programs", random.Random(0)
    expected = chaos.finished(tmp_path / "undisturbed", chaos.TWO_BY_TWO, STEPS, programs)
    how = (tmp_path / "run", chaos.TWO_BY_TWO, STEPS, programs)

    with chaos.job(*how) as one:
        assert chaos.reach(one, "training", chance)
        one.process.send_signal(signal.SIGINT)
        status, said, errors = one.end()
        assert (status, said) == (130, None), errors
        (line,) = [line for line in errors if "stopped by" in line]
        saved = max(one.saved())
        assert f"at step {saved} of {STEPS}: saved in" in line

    with chaos.job(*how) as one:
        assert chaos.reach(one, "in a save", chance)
        workers = one.workers()
        one.process.send_signal(signal.SIGINT)
        one.process.send_signal(signal.SIGINT)
        status, said, errors = one.end()
        assert said is None
        assert status in (2, 130), errors
        assert not any(worker.is_running() for worker in workers)
        assert max(one.saved()) >= saved

    with chaos.job(*how) as one:
        assert chaos.reach(one, "training", chance)
        for host in one.workers():
            host.send_signal(signal.SIGSTOP)
            time.sleep(8)
            assert not one.is_over()
            host.send_signal(signal.SIGCONT)
        status, said, errors = one.end()
    assert (status, said) == (0, expected), errors
    assert chaos.rows(tmp_path / "run") == chaos.rows(tmp_path / "undisturbed")


@pytest.mark.nightly
def test_other_meshes_read_the_same_data_in_the_same_order(tmp_path):
    """2 x 4 is killed, 4 x 2 and 8 go on and are killed, and 1 ends with the same batch."""
    programs, chance, steps = tmp_path / "programs", random.Random(0), 48
    whole = chaos.finished(tmp_path / "undisturbed", chaos.TWO_BY_FOUR, steps, programs)
    for layout, victim in (
        (chaos.TWO_BY_FOUR, "worker"),
        (chaos.FOUR_BY_TWO, "coordinator"),
        (chaos.EIGHT, "launcher"),
    ):
        with chaos.job(tmp_path / "run", layout, steps, programs) as one:
            assert chaos.reach(one, "after a save", chance)
            workers = one.workers()
            (one.process if victim == "launcher" else workers[victim == "worker"]).kill()
            assert one.end()[0] != 0
    ended = chaos.finished(tmp_path / "run", chaos.ONE, steps, programs)
    _like_the_undisturbed(tmp_path, ended, whole)


@pytest.mark.nightly
def test_a_job_that_loses_a_host_goes_on_with_half_of_them(tmp_path):
    programs, steps = tmp_path / "programs", 24
    whole = chaos.finished(tmp_path / "undisturbed", chaos.TWO_BY_TWO, steps, programs)
    elastic = ("--restarts", "1", "--fewest", "1")
    with chaos.job(tmp_path / "run", chaos.TWO_BY_TWO, steps, programs, elastic) as one:
        one.wait_for(lambda: one.steps_seen() >= 2)
        one.workers()[1].kill()
        status, ended, errors = one.end()
    assert status == 0, errors
    _like_the_undisturbed(tmp_path, ended, whole)


def _like_the_undisturbed(tmp_path, ended, whole):
    assert ended.split()[:2] == whole.split()[:2]  # the exact mark of every token in its place
    for one, other in zip(
        *map(chaos.rows, (tmp_path / "run", tmp_path / "undisturbed")), strict=True
    ):
        assert one.keys() == other.keys()
        assert one["step"] == other["step"]
        assert one["loss"] == pytest.approx(other["loss"], rel=LOSS_TOLERANCE)


@contextmanager
def small_disk(folder, size):
    """A folder on a disk of so many bytes; skips the test where none may be mounted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True)
    except FileNotFoundError:
        done = None
    if done is None or done.returncode:
        pytest.skip("no file system may be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def filled(folder, left):
    """Fill a disk but for so many bytes."""
    space = os.statvfs(folder)
    (folder / "other.bin").write_bytes(bytes(space.f_bavail * space.f_frsize - left))


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="mounts a tmpfs")
def test_a_disk_that_fills_up_is_one_line_and_loses_nothing(tmp_path):
    programs, chance = tmp_path / "programs", random.Random(0)
    expected = chaos.finished(tmp_path / "undisturbed", chaos.TWO_BY_TWO, STEPS, programs)
    with small_disk(tmp_path / "disk", 8 << 20) as disk:
        how = (disk / "run", chaos.TWO_BY_TWO, STEPS, programs)
        for left in (600_000, 0):  # no room for a checkpoint, and none for a row of metrics
            with chaos.job(*how) as one:
                assert chaos.reach(one, "after a save", chance)
                filled(disk, left)
                status, _, errors = one.end()
                assert status == 2, errors
                said = [line for line in errors if "no space" in line or "No space" in line]
                assert said, errors
                assert not any("Traceback" in line for line in errors), errors
                assert one.saved()
            (disk / "other.bin").unlink()
        assert chaos.finished(*how) == expected
        assert chaos.rows(disk / "run") == chaos.rows(tmp_path / "undisturbed")
