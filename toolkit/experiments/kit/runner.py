"""Run an experiment: skip finished runs, resume unfinished ones, report.

A folder holds `runs.jsonl` (a line per finished run), `running/` (checkpoints of the run under way)
and, at the end, `figure.png`.
"""

import itertools
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from toolkit._checks import checked
from toolkit.experiments.kit.experiment import (
    Experiment,
    Run,
    Stopped,
    Workspace,
    result_table,
)
from toolkit.experiments.kit.records import FinishedRuns, is_changed, read_runs, results_of
from toolkit.experiments.kit.verdicts import LEAST_SEEDS
from toolkit.training.checkpoints.locks import HeldError, locked


@checked
def run_experiment(
    experiment: Experiment,
    directory: Path,
    *,
    seeds: int = LEAST_SEEDS,
    only: str = "",
    runs: Path | None = None,
) -> bool:
    """Run all unfinished runs, then print the table and the verdicts and write the figure.

    Several processes may share a folder and divide its runs. A killed call loses at most the time
    since the last checkpoint of its current run; called again, it ends with the same numbers.

    Args:
        experiment: what to run.
        directory: the experiment's folder; made if missing.
        seeds: number of seeds per setting.
        only: run the settings whose label contains this string.
        runs: the file of finished runs to resume and extend; None for `runs.jsonl` in the folder. A
            file in `data/experiments` refuses runs from a tree with uncommitted changes.

    Returns:
        Whether all runs are finished; False after Ctrl-C, or while another process still works on
        some.

    Raises:
        ValueError: seeds or only out of range, the file holds another experiment or another
            version of it, or is a record and the tree has uncommitted changes.
        OSError: the folder cannot be written.

    Cost: the remaining runs; the expected minutes are printed first.

    Example:
        >>> from pathlib import Path
        >>> run_experiment(load_experiment("parity"), Path("parity"), seeds=1)  # doctest: +SKIP
        True
    """
    wanted = experiment.runs(seeds, only)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    finished = FinishedRuns(runs or directory / "runs.jsonl", experiment)
    left = [run for run in wanted if not finished.holds(run)]
    _announce(experiment, wanted, left)
    words = ["toolkit", "experiment", experiment.name, "--seeds", str(seeds)]
    command = shlex.join([*words, "--only", only] if only else words)
    with suppress(KeyboardInterrupt, Stopped):
        _run_all(experiment, left, finished, directory, command)
    finished.refresh()
    count = sum(finished.holds(run) for run in wanted)
    is_complete = count == len(wanted)
    if count:
        _report(experiment, finished.lines, wanted, directory, "measured here")
    if not is_complete:
        print(
            f"\nstopped with {count} of {len(wanted)} runs finished; the same command goes on "
            "with those that no other process has begun",
            file=sys.stderr,
        )
    return is_complete


@checked
def show_recorded(experiment: Experiment, recorded: Path, directory: Path) -> None:
    """Print the table and verdicts and draw the figure of recorded runs.

    Args:
        experiment: the experiment.
        recorded: its file of finished runs.
        directory: folder of the figure; made if missing.

    Raises:
        ValueError: the file holds no runs of this experiment.
        OSError: it cannot be read.

    Example:
        >>> from pathlib import Path
        >>> record = Path("data/experiments/parity.jsonl")
        >>> show_recorded(load_experiment("parity"), record, Path("parity"))  # doctest: +SKIP
    """
    lines = read_runs(Path(recorded), experiment)
    if not lines:
        raise ValueError(f"recorded: {Path(recorded).name} is missing or empty")
    Path(directory).mkdir(parents=True, exist_ok=True)
    _report(experiment, lines, None, Path(directory), "recorded")


def _announce(experiment: Experiment, runs: list[Run], left: list[Run]) -> None:
    work = {id(run): experiment.work(run.setting) for run in left}
    whole = LEAST_SEEDS * sum(map(experiment.work, experiment.settings.values()))
    minutes = experiment.minutes * sum(work.values()) / whole
    print(f"{experiment.name}: {experiment.title}")
    print(
        f"{len(runs)} runs, {len(runs) - len(left)} finished already; about {minutes:.0f} minutes "
        "on two idle cores (modelled)",
        flush=True,
    )


def _run_all(
    experiment: Experiment, left: list[Run], finished: FinishedRuns, folder: Path, command: str
) -> None:
    from tqdm import tqdm

    whole = sum(experiment.work(run.setting) for run in left)
    form = "{l_bar}{bar}| {elapsed} gone, {remaining} left  {postfix}"
    with tqdm(total=100.0, bar_format=form, dynamic_ncols=True, disable=not left) as bar:
        done = 0.0
        for block in _blocks(experiment, left):
            with _claimed(block, finished, folder) as claimed:
                for run in claimed:
                    work = experiment.work(run.setting)
                    bar.set_postfix_str(f"{run.label}, seed {run.seed}")

                    def progress(share: float, done: float = done, work: float = work) -> None:
                        # Shares may add up to a rounding error too much, of which tqdm would warn.
                        bar.update(min(100.0, 100 * (done + share * work) / whole) - bar.n)

                    workspace = Workspace(_workspace(folder, run), progress)
                    workspace.directory.mkdir(parents=True, exist_ok=True)
                    outcome = experiment.execute(run.setting, run.seed, workspace)
                    finished.append(run, _plain(outcome), command)
                    shutil.rmtree(workspace.directory)
                    done += work
                    progress(0.0, done)


def finish_runs(
    experiment: Experiment, runs: Sequence[Run], finished: FinishedRuns, folder: Path, command: str
) -> None:
    """Run what is left of these runs, and wait for those that other processes are at.

    KeyboardInterrupt, or `Stopped`, where the process is asked to stop.
    """
    while left := [run for run in runs if not finished.holds(run)]:
        _run_all(experiment, left, finished, folder, command)
        finished.refresh()
        for run in left:
            if not finished.holds(run):
                print(f"waiting for the process that is at {run.label}, seed {run.seed}")
                with locked(_workspace(folder, run).with_suffix(".lock"), wait=True):
                    finished.refresh()
                break


def _blocks(experiment: Experiment, runs: list[Run]) -> list[list[Run]]:
    """Groups of runs for one process: seeds that are trained together."""
    keyed = itertools.groupby(runs, lambda run: (run.label, run.seed // experiment.seeds_together))
    return [list(block) for _, block in keyed]


@contextmanager
def _claimed(block: list[Run], finished: FinishedRuns, folder: Path) -> Iterator[list[Run]]:
    """Those runs of a block that are still to do, held against other processes in this folder.

    None of them when another process is at the block; what it leaves undone, a later call does.
    """
    claim = _workspace(folder, block[0]).with_suffix(".lock")
    claim.parent.mkdir(parents=True, exist_ok=True)
    try:
        with locked(claim):
            finished.refresh()
            yield [run for run in block if not finished.holds(run)]
            # Whoever has opened this file meanwhile finds the runs finished, and does nothing.
            claim.unlink(missing_ok=True)
    except HeldError:
        yield []


def _workspace(folder: Path, run: Run) -> Path:
    return folder / "running" / re.sub(r"\W+", "-", f"{run.label} seed {run.seed}").strip("-")


def _report(
    experiment: Experiment,
    lines: list[dict[str, Any]],
    runs: list[Run] | None,
    folder: Path,
    how: str,
) -> None:
    from toolkit.figures import style

    results = results_of(lines, experiment, runs)
    facts = [line["environment"] for line in lines]
    machines = dict.fromkeys(f"{x['device']}, jax {x['versions']['jax']}" for x in facts)
    dates = sorted({x["date"][:10] for x in facts})
    caption = f"{how}: {'; '.join(machines)}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}"
    print(f"\n{experiment.title}  ({caption})\n")
    print(experiment.report(results) if experiment.report else result_table(experiment, results))
    changed = [line["label"] for line in lines if is_changed(line["environment"]["commit"])]
    if changed:
        names = ", ".join(repr(name) for name in dict.fromkeys(changed))
        print(f"\nFrom a tree with uncommitted changes, to be run again: {names}.")
    print("\nMean +- standard deviation over the seeds. A claim is seen, or contradicted, by the")
    print("interval of its mean margin, at 95 % for all of them together. The claims:\n")
    for verdict in experiment.verdicts(results):
        print(verdict)
    print(f"\nOut of reach of two cores: {experiment.beyond}")
    path = folder / "figure.png"
    with style():
        experiment.draw(results, caption).savefig(path)
    print(f"figure: {path}")


def _plain(outcome: Any) -> dict[str, Any]:
    """Numbers of numpy and jax as Python's."""
    return {
        name: [float(number) for number in value] if hasattr(value, "__len__") else float(value)
        for name, value in outcome.items()
    }
