"""Kills, stops and full disks against real jobs over gloo, and what came of them.

python tests/support/chaos.py KILLS [FILE]       prints the counts as they stand in the docs

FILE keeps the counts after every run, so that the same command goes on where it was stopped.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

SCRIPT = Path(__file__).parent / "chaos_job.py"
REPOSITORY = Path(__file__).parents[2]
TWO_BY_FOUR, FOUR_BY_TWO = (2, 4, "data=4,model=2"), (4, 2, "data=2,model=4")
EIGHT, ONE = (1, 8, "data=8"), (1, 1, "data=1")
TWO_BY_TWO = (2, 2, "data=4")
KILLS_PER_RUN = 10
MOMENTS = ("starting", "training", "in a save", "after a save")
VICTIMS = ("coordinator", "worker", "launcher")  # the first two by the number of the process
PATIENCE_SECONDS = 300


class Job:
    """A run under `toolkit launch`, whose lines are read while it goes on."""

    def __init__(self, directory, layout, steps, programs, launcher=()):
        processes, devices, mesh = layout
        self.directory = Path(directory)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join((str(REPOSITORY), str(SCRIPT.parent))),
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "JAX_COMPILATION_CACHE_DIR": str(programs),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "PYTHONPYCACHEPREFIX": str(Path(programs).parent / "compiled"),
            "TMPDIR": str(Path(programs).parent),
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # imports are half of what a start costs
        command = [sys.executable, str(SCRIPT), str(directory), mesh, str(steps)]
        if processes > 1:
            cli = [sys.executable, "-m", "toolkit", "launch", "--processes", str(processes)]
            command = [*cli, "--devices", str(devices), *launcher, "--", *command]
        self.process = subprocess.Popen(
            command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        self.lines, self.errors, self.old = [], [], set()
        self.processes, self.first_line = processes, 0
        self.readers = [
            threading.Thread(target=self._read, args=pair, daemon=True)
            for pair in ((self.process.stdout, self.lines), (self.process.stderr, self.errors))
        ]
        for reader in self.readers:
            reader.start()

    def _read(self, stream, lines):
        for line in stream:
            lines.append(line.rstrip("\n"))

    def workers(self):
        """The processes of the job, by their number; fewer while it starts."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.process.pid)
            children = process.children() if self.processes > 1 else [process]
            return sorted(children, key=lambda child: child.create_time())
        return []

    def is_over(self):
        return self.process.poll() is not None

    def wait_for(self, condition):
        """Whether a condition came true before the job was over."""
        until = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if self.is_over():
                return False
            assert time.monotonic() < until, (self.lines, self.errors)
            time.sleep(0.01)
        return True

    def has_started_again(self):
        """Whether all processes are others than those that `restarted` knew."""
        now = {worker.pid for worker in self.workers()}
        return len(now) == self.processes and not now & self.old

    def steps_seen(self):
        """Rows of metrics since the job started, or started again."""
        return sum(line.startswith("step") for line in self.lines[self.first_line :])

    def saved(self):
        found = self.directory.glob("checkpoints/*")
        return {int(path.name) for path in found if path.name.isdigit()}

    def is_saving(self):
        return any(self.directory.glob("checkpoints/*.orbax-checkpoint-tmp"))

    def end(self):
        """Wait for the end: (exit status, what the job says of its state, errors)."""
        self.process.wait(PATIENCE_SECONDS)
        for reader in self.readers:
            reader.join(30)
        said = [line for line in self.lines if line.startswith("order")]
        return self.process.returncode, said[-1] if said else None, self.errors


@contextmanager
def job(*arguments, **how):
    """A job whose processes end with the block, whatever happens."""
    one = Job(*arguments, **how)
    try:
        yield one
    finally:
        for worker in one.workers():
            with suppress(psutil.NoSuchProcess):
                worker.kill()
        one.process.kill()
        one.process.wait()
        for reader in one.readers:
            reader.join(30)
        for stream in (one.process.stdout, one.process.stderr):
            stream.close()


def finished(*arguments):
    """What an undisturbed job says at its end."""
    with job(*arguments) as one:
        status, said, errors = one.end()
    assert status == 0, errors
    return said


def rows(directory):
    from toolkit.training import read_metrics

    found = read_metrics(Path(directory) / "metrics.jsonl")
    return [{name: row[name] for name in row if name != "seconds"} for row in found]


def reach(one, moment, chance):
    """Wait for a moment of a job; False if the job ended before."""
    if not one.wait_for(one.has_started_again):
        return False
    if moment == "starting":
        time.sleep(chance.uniform(0.0, 6.0))
        return not one.is_over()
    wanted = chance.randint(1, 3)
    if not one.wait_for(lambda: one.steps_seen() >= wanted):
        return False
    if moment == "training":
        time.sleep(chance.uniform(0.0, 0.3))
    elif moment == "in a save":
        return one.wait_for(one.is_saving)
    elif moment == "after a save":
        before = one.saved()
        return one.wait_for(lambda: one.saved() - before)
    return not one.is_over()


def kill(one, victim):
    """Kill a process of the job, which starts again unless it was the launcher.

    False if the job was over before. AssertionError if a process outlives its launcher, a kill is
    not reported, or a complete checkpoint goes that was not the oldest.
    """
    workers, saved, said = one.workers(), one.saved(), len(one.errors)
    if len(workers) < one.processes:
        return False
    one.old, one.first_line = {worker.pid for worker in workers}, len(one.lines)
    if victim == "launcher":
        one.process.kill()
        _, alive = psutil.wait_procs(workers, timeout=60)
        assert not alive, f"{len(alive)} processes outlived their launcher"
    else:
        number = VICTIMS.index(victim)
        workers[number].kill()
        sentence = f"process {number} of {len(workers)} was killed by SIGKILL; starting again"
        one.wait_for(lambda: any("starting again" in line for line in one.errors[said:]))
        assert any(sentence in line for line in one.errors[said:]), one.errors[said:]
    lost = {step for step in sorted(saved)[-2:] if step not in one.saved()}
    assert not lost or max(one.saved()) > max(saved), f"checkpoints {lost} were lost"
    return True


def killed_runs(folder, kills, file=None, layout=TWO_BY_TWO):
    """So many kills at random moments of runs that all must end as an undisturbed one.

    Returns the counts by moment and victim. AssertionError at the first run that ends otherwise.
    """
    folder, counts = Path(folder), Counter()
    if file is not None and Path(file).exists():
        counts.update({tuple(kind): count for kind, count in json.loads(Path(file).read_text())})
    per_run = min(kills, KILLS_PER_RUN)
    steps, programs = 16 + 10 * per_run, folder / "programs"
    expected = finished(folder / "undisturbed", layout, steps, programs)
    kinds = [(moment, victim) for moment in MOMENTS for victim in VICTIMS]
    random.Random(0).shuffle(kinds)
    while counts.total() < kills:
        directory, status = folder / f"run-{counts.total()}", None
        chance = random.Random(counts.total())
        todo = min(per_run, kills - counts.total())
        while status is None:
            with job(directory, layout, steps, programs, ("--restarts", str(todo))) as one:
                is_launched = True
                while todo and is_launched:
                    moment, victim = kinds[counts.total() % len(kinds)]
                    if not (reach(one, moment, chance) and kill(one, victim)):
                        break  # the run was finished before it could be killed
                    counts[moment, victim], todo = counts[moment, victim] + 1, todo - 1
                    is_launched = victim != "launcher"
                if is_launched:
                    status, said, errors = one.end()
                    assert (status, said) == (0, expected), errors
        assert rows(directory) == rows(folder / "undisturbed")
        print(f"{counts.total()} of {kills} kills", file=sys.stderr, flush=True)
        if file is not None:
            Path(file).write_text(json.dumps(list(counts.items())))
    return counts


def table(counts):
    """The counts as a Markdown table."""
    lines = ["| killed | " + " | ".join(MOMENTS) + " |", "|---" * (len(MOMENTS) + 1) + "|"]
    for victim in VICTIMS:
        numbers = (str(counts[moment, victim]) for moment in MOMENTS)
        lines.append(f"| {victim} | {' | '.join(numbers)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        found = killed_runs(place, int(sys.argv[1]), *sys.argv[2:3])
    print(table(found))
    print(f"{found.total()} kills in {time.monotonic() - began:.0f} s; every run ended alike")
