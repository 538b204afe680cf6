"""The runner with an experiment of its own: what it skips, resumes, judges and redraws."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.experiments import (
    Claim,
    Column,
    Experiment,
    Results,
    Stopped,
    above,
    result_table,
    run_experiment,
    show_recorded,
)
from toolkit.experiments.kit import records
from toolkit.training import read_metrics
from toolkit.training.checkpoints.locks import locked


@dataclasses.dataclass(frozen=True)
class Slope:
    slope: float
    points: int = 4


def draw(results, caption):
    from toolkit.figures import new_figure

    figure = new_figure(4, 3)
    axes = figure.subplots()
    for label in results.labels:
        axes.plot(results.curves(label, "line").mean(0), label=label)
    figure.text(0, 0, caption)
    return figure


def line_experiment(calls, fail_at=None):
    """Each run writes its points to its folder one by one, and may be killed in the middle."""

    def execute(setting, seed, workspace):
        path = workspace.directory / "points.json"
        points = json.loads(path.read_text()) if path.exists() else []
        while len(points) < setting.points:
            calls.append((setting.slope, seed, len(points)))
            if calls[-1] == fail_at:
                raise KeyboardInterrupt
            points.append(seed + setting.slope * len(points))
            path.write_text(json.dumps(points))
            workspace.progress(len(points) / setting.points)
        return {"end": points[-1], "line": points}

    return Experiment(
        name="lines",
        title="Which line ends higher?",
        settings={"flat": Slope(0.0), "steep": Slope(2.0)},
        execute=execute,
        columns=(Column("end", "m", 1),),
        claims=(
            Claim("steep lines end higher", above("end", ["steep"], ["flat"], 0)),
            Claim("curved lines exist", above("end", ["curved"], 0.0)),
        ),
        draw=draw,
        beyond="longer lines.",
        minutes=0.1,
    )


def test_table_verdicts_records_and_figure(tmp_path, capsys):
    assert run_experiment(line_experiment([]), tmp_path)
    out = capsys.readouterr().out
    assert (
        "seen         steep lines end higher\n"
        "             5 of 5 seeds bear it out, by 6 to 6; end: steep 6 7 8 9 10, flat 0 1 2 3 4\n"
        "not shown    curved lines exist (0 seeds)\n"
        "             no finished run of 'curved' has 'end'\n"
    ) in out
    assert "8.0 +- 1.6" in out
    assert (tmp_path / "figure.png").stat().st_size > 1000
    assert not list((tmp_path / "running").iterdir())
    line = read_metrics(tmp_path / "runs.jsonl")[6]
    assert (line["label"], line["seed"]) == ("steep", 1)
    assert line["setting"] == {"slope": 2.0, "points": 4}
    assert line["outcome"] == {"end": 7.0, "line": [1.0, 3.0, 5.0, 7.0]}
    assert line["environment"]["command"] == "toolkit experiment lines --seeds 5"
    assert set(line["environment"]) == {"device", "versions", "commit", "date", "command"}


def test_finished_runs_are_skipped_and_the_one_under_way_resumes(tmp_path, capsys):
    unbroken, broken = [], []
    run_experiment(line_experiment(unbroken), tmp_path / "unbroken", seeds=2)
    assert not run_experiment(
        line_experiment(broken, fail_at=(2.0, 0, 2)), tmp_path / "broken", seeds=2
    )
    assert "2 of 4 runs finished; the same command goes on" in capsys.readouterr().err
    broken.pop()  # where it was killed
    assert run_experiment(line_experiment(broken), tmp_path / "broken", seeds=2)
    assert broken == unbroken, "no point is computed twice"
    lines = [
        [json.loads(line)["outcome"] for line in (folder / "runs.jsonl").read_text().splitlines()]
        for folder in (tmp_path / "unbroken", tmp_path / "broken")
    ]
    assert lines[0] == lines[1]
    calls = []
    assert run_experiment(line_experiment(calls), tmp_path / "broken", seeds=2)
    assert calls == []


def test_a_line_cut_short_is_run_again(tmp_path):
    run_experiment(line_experiment([]), tmp_path, seeds=1)
    path = tmp_path / "runs.jsonl"
    path.write_text(path.read_text()[:-20])
    calls = []
    run_experiment(line_experiment(calls), tmp_path, seeds=1)
    assert {slope for slope, *_ in calls} == {2.0}
    assert len(path.read_text().splitlines()) == 2


def test_stopping_politely_is_no_error(tmp_path):
    def execute(setting, seed, workspace):
        raise Stopped

    assert not run_experiment(dataclasses.replace(line_experiment([]), execute=execute), tmp_path)
    assert not (tmp_path / "runs.jsonl").exists()


def test_only_and_seeds_choose_runs(tmp_path, capsys):
    calls = []
    run_experiment(line_experiment(calls), tmp_path, seeds=1, only="flat")
    assert {slope for slope, *_ in calls} == {0.0}
    assert "not shown    steep lines end higher (0 seeds)" in capsys.readouterr().out
    line = read_metrics(tmp_path / "runs.jsonl")[0]
    assert line["environment"]["command"] == "toolkit experiment lines --seeds 1 --only flat"
    with pytest.raises(ValueError, match="no setting; they are: flat; steep"):
        run_experiment(line_experiment([]), tmp_path, only="round")
    with pytest.raises(ValueError, match="seeds"):
        run_experiment(line_experiment([]), tmp_path, seeds=0)


def test_two_processes_share_a_folder(tmp_path):
    def execute(setting, seed, workspace):
        if seed == 1:  # meanwhile somebody else runs the other setting
            run_experiment(line_experiment([]), tmp_path, only="steep")
        return inner.execute(setting, seed, workspace)

    inner = line_experiment([])
    run_experiment(dataclasses.replace(inner, execute=execute), tmp_path, only="flat")
    calls = []
    run_experiment(line_experiment(calls), tmp_path)
    assert calls == []


APPEND = """
import sys
from pathlib import Path
from toolkit.experiments.kit import records
from toolkit.experiments.kit.experiment import Run
from test_experiments_runner import Slope, line_experiment

records.environment = lambda: dict.fromkeys(("device", "versions", "commit", "date"))
directory, first, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
finished = records.FinishedRuns(directory / "runs.jsonl", line_experiment([]))
for seed in range(first, first + count):
    finished.append(Run("flat", Slope(0.0), seed), {"end": float(seed)}, "")
    print(seed, flush=True)
"""


def start(code, *arguments):
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": f"{here}{os.pathsep}{here.parents[1]}"}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.slow
def test_four_processes_append_and_lose_nothing(tmp_path):
    """1,000 appends; a fifth process is killed among them, and may lose its last one only."""
    writers = [start(APPEND, tmp_path, 250 * number, 250) for number in range(4)]
    victim = start(APPEND, tmp_path, 5000, 5000)
    for _ in range(20):
        victim.stdout.readline()
    victim.kill()
    done = [int(line) for line in victim.communicate()[0].split()]
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    seeds = [row["seed"] for row in read_metrics(tmp_path / "runs.jsonl")]
    assert len(seeds) == len(set(seeds))
    assert set(range(1000)) <= set(seeds)
    assert set(range(5000, 5020)) | set(done) <= set(seeds)


SHARE = """
import sys, time
from pathlib import Path
import dataclasses
from toolkit.experiments import run_experiment
from test_experiments_runner import line_experiment

def execute(setting, seed, workspace):
    print(setting.slope, seed, flush=True)
    time.sleep(0.5)
    return inner.execute(setting, seed, workspace)

inner = line_experiment([])
run_experiment(dataclasses.replace(inner, execute=execute), Path(sys.argv[1]))
"""


@pytest.mark.nightly
def test_two_processes_share_the_work(tmp_path):
    both = [start(SHARE, tmp_path) for _ in range(2)]
    said = [process.communicate()[0] for process in both]
    began = [line for text in said for line in text.splitlines() if re.fullmatch(r"\S+ \d", line)]
    assert len(began) == len(set(began)) == 10, "each run is done once"
    assert all(process.returncode == 0 for process in both)
    assert not list((tmp_path / "running").iterdir())


def test_what_a_kill_cut_short_does_not_spoil_the_next_append(tmp_path):
    run_experiment(line_experiment([]), tmp_path, seeds=1, only="flat")
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write('{"experiment": "lin')
    run_experiment(line_experiment([]), tmp_path, seeds=1)
    assert len(read_metrics(tmp_path / "runs.jsonl")) == 2


def test_a_run_that_another_process_is_at_is_left_to_it(tmp_path, capsys):
    running = tmp_path / "running"
    running.mkdir()
    calls = []
    with locked(running / "flat-seed-0.lock"):
        assert not run_experiment(line_experiment(calls), tmp_path, seeds=1)
    assert {slope for slope, *_ in calls} == {2.0}
    assert "1 of 2 runs finished" in capsys.readouterr().err
    assert run_experiment(line_experiment(calls), tmp_path, seeds=1)


def test_another_experiment_or_another_version_of_it_is_refused(tmp_path):
    run_experiment(line_experiment([]), tmp_path, seeds=1)
    other = dataclasses.replace(line_experiment([]), name="circles")
    with pytest.raises(ValueError, match="belongs to experiment 'lines'"):
        run_experiment(other, tmp_path)
    changed = dataclasses.replace(line_experiment([]), settings={"flat": Slope(0.1)})
    with pytest.raises(ValueError, match="another version"):
        run_experiment(changed, tmp_path)


def test_a_record_is_shown_without_running(tmp_path, capsys):
    run_experiment(line_experiment([]), tmp_path / "here")
    measured = capsys.readouterr().out
    calls = []
    show_recorded(line_experiment(calls), tmp_path / "here/runs.jsonl", tmp_path / "there")
    recorded = capsys.readouterr().out
    assert calls == []
    assert "recorded:" in recorded
    assert "8.0 +- 1.6" in recorded
    assert (
        measured.split("The claims:")[1].splitlines()[:5]
        == (recorded.split("The claims:")[1].splitlines()[:5])
    )
    assert (tmp_path / "there/figure.png").exists()
    other = dataclasses.replace(line_experiment([]), name="circles")
    with pytest.raises(ValueError, match="belongs to experiment 'lines', not 'circles'"):
        show_recorded(other, tmp_path / "here/runs.jsonl", tmp_path / "there")
    with pytest.raises(ValueError, match=r"nothing\.jsonl is missing or empty"):
        show_recorded(line_experiment(calls), tmp_path / "nothing.jsonl", tmp_path / "there")


def test_a_record_takes_nothing_from_a_changed_tree(tmp_path, monkeypatch, capsys):
    def commit(name):
        facts = {"device": "a core", "commit": name, "date": "2026-11-22"}
        facts["versions"] = {"python": "3.12.1", "jax": "1"}
        monkeypatch.setattr(records, "environment", lambda: facts)

    monkeypatch.setattr(records, "RECORDS", tmp_path / "data")
    (tmp_path / "data").mkdir()
    record, calls = tmp_path / "data/lines.jsonl", []
    for changed in ("12ab+changes", "unknown"):
        commit(changed)
        with pytest.raises(ValueError, match=r"lines\.jsonl is a record, and this tree is not a"):
            run_experiment(line_experiment(calls), tmp_path, seeds=1, runs=record)
    assert not calls
    commit("12ab+changes")
    assert run_experiment(line_experiment([]), tmp_path, seeds=1, only="steep")
    said = capsys.readouterr().out
    assert "From a tree with uncommitted changes, to be run again: 'steep'." in said
    commit("12ab")
    assert run_experiment(line_experiment([]), tmp_path, seeds=1, runs=record)
    assert "uncommitted" not in capsys.readouterr().out
    assert len(read_metrics(record)) == 2


def test_table_leaves_missing_numbers_out():
    results = Results({"flat": {0: {"line": [1.0]}}, "steep": {}})
    assert result_table(line_experiment([]), results).splitlines()[2:] == ["flat         1"]
