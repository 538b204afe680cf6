"""`toolkit compare`: what is equal, who is tuned how, the verdict, the page; and one run of it."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from toolkit.bench.mixers.matrix_products import matrix_flops
from toolkit.cli import commands as cli
from toolkit.experiments import Comparison, load_comparison, show_comparison
from toolkit.experiments.compare.comparison import CURVE, LOSS
from toolkit.experiments.compare.matching import matched, run_flops
from toolkit.experiments.compare.running import FACTS, RATES, RUNS, _set_aside_other_rates
from toolkit.experiments.kit.records import FinishedRuns, results_of
from toolkit.language import TrainingRun
from toolkit.looped import LoopedConfig, LoopedLM, flops_per_token, parameter_count

SIZES = {"width": 32, "heads": 2, "feed_forward": 96}
RUN = {"steps": 40, "batch": 2, "sequence_length": 64}
COUNTED = 0.02  # of the FLOPs of a gradient as jax traces it


def run(pattern, loops=1, **settings):
    return TrainingRun(LoopedConfig.tiny(pattern, loops=loops, **SIZES), **RUN | settings)


@pytest.mark.parametrize("words", [{"pattern": "gdn mamba2"}, {"pattern": "gla", "loops": 2}])
def test_flops_are_those_of_the_traced_gradient(words):
    import jax
    from flax import nnx

    config = LoopedConfig.tiny(prelude="gdn", **words, width=64, heads=2)
    model = nnx.eval_shape(lambda: LoopedLM(config, rngs=nnx.Rngs(0)))
    graph, params = nnx.split(model)

    def loss(params, tokens):
        return jax.nn.logsumexp(nnx.merge(graph, params)(tokens), -1).sum()

    tokens = jax.ShapeDtypeStruct((1, 128), "int32")
    counted = matrix_flops(jax.grad(loss), params, tokens) / 128
    assert flops_per_token(config, 128) == pytest.approx(counted, rel=COUNTED)
    fewer = dataclasses.replace(config, prelude="")
    assert flops_per_token(fewer, 128) != pytest.approx(counted, rel=COUNTED)  # the control


def test_each_match_makes_equal_what_it_says_and_nothing_else():
    both = {"plain": run("full full full full"), "looped": run("gdn full", loops=2)}
    flops = matched(both, "flops", dict)
    assert flops["plain"] is both["plain"]
    assert run_flops(flops["looped"]) == pytest.approx(run_flops(both["plain"]), rel=0.01)
    assert flops["looped"].steps == 40
    assert flops["looped"].config.feed_forward != 96
    parameters = matched(both, "parameters", dict)["looped"]
    plain = parameter_count(both["plain"].config)
    assert parameter_count(parameters.config) == pytest.approx(plain, rel=0.01)
    assert run_flops(parameters) > 1.3 * run_flops(both["plain"])  # the control
    longer = {"plain": both["plain"], "looped": run("gdn", steps=7)}
    training = matched(longer, "training-flops", dict)["looped"]
    assert training.config == longer["looped"].config
    assert run_flops(training) == pytest.approx(run_flops(both["plain"]), rel=0.02)
    timed = matched(both, "time", lambda _: {"plain": 2.0, "looped": 1.0})
    assert (timed["plain"].steps, timed["looped"].steps) == (40, 80)
    assert matched(both, "tokens", dict) == both
    with pytest.raises(ValueError, match=r"steps: looped has 7 and plain 40.*--match"):
        matched(longer, "flops", dict)
    with pytest.raises(ValueError, match=r"twice: no feed_forward size.*training-flops"):
        matched({"once": run("full"), "twice": run("gdn full", loops=2)}, "flops", dict)


def recorded(folder, differences, learns=1.0):
    """A folder as if a looped model's loss had differed so from a plain model's, seed by seed."""
    from toolkit._files import sealed_json, write_whole

    both = {"plain": run("full"), "looped": run("full", loops=2)}
    facts = {
        "matched": {label: dataclasses.asdict(setting) for label, setting in both.items()},
        "match": "tokens", "unit": "bits per byte", "smallest": 0.01, "factor": 2.0,
        "text": {"name": "prose", "size": 1000, "sha256": "0"},
    }  # fmt: skip
    folder.mkdir()
    write_whole(folder / FACTS, sealed_json(json.loads(json.dumps(facts))))
    comparison = Comparison(both, "tokens", "bits per byte", rates=3)
    tuning = comparison.tuning()
    best = {"plain": 0.003, "looped": 0.0015}
    for each in tuning.runs(1):
        rate = each.setting.run.learning_rate
        loss = 2 + abs(np.log(rate / best[each.label.partition(",")[0]]))
        FinishedRuns(folder / RATES, tuning).append(each, {LOSS: float(loss)}, "command")
    final = comparison.final(best)
    for each in final.runs(len(differences)):
        loss = 2 + 0.3 * each.seed + differences[each.seed] * (each.label == "looped")
        curve = {"step": [10, 40], CURVE: [loss + learns, loss], "seconds": 1.0}
        FinishedRuns(folder / RUNS, final).append(each, {LOSS: loss, **curve}, "command")
    return folder


@pytest.mark.parametrize(
    ("differences", "learns", "word"),
    [
        ([-0.03, -0.035, -0.03, -0.032, -0.034], 1.0, "Seen"),
        ([0.03, 0.035, 0.03, 0.032, 0.034], 1.0, "Contradicted"),
        ([0.001, -0.002, 0.0, 0.002, -0.001], 1.0, "No difference that matters"),
        ([-0.03, -0.035, -0.03], 1.0, "Not shown"),
        ([-0.03, -0.035, -0.03, -0.032, -0.034], 0.0, "Void"),
    ],
)
def test_the_page_says_the_verdict_of_paired_seeds(tmp_path, capsys, differences, learns, word):
    """Losses differ by 1.2 between seeds, so that only pairs can show these differences."""
    folder = recorded(tmp_path / "folder", differences, learns)
    page = show_comparison(*load_comparison(folder), tmp_path / "page")
    printed, text = capsys.readouterr().out, page.read_text()
    claim = f"{word}: looped has a lower held-out loss than plain"
    assert claim in printed
    assert claim in text
    assert ("plain is not seen to learn; give it more steps" in text) == (word == "Void")
    assert f"{np.mean(differences):+.4f}" in text
    assert "The best rate of looped, 0.0015, is the smallest that was tried" in text
    assert "The best rate of plain" not in text
    assert "<svg" in text
    assert (page.parent / "comparison.pdf").read_bytes().startswith(b"%PDF")


def test_a_record_is_shown_and_left_as_it_is(tmp_path, monkeypatch, capsys):
    folder = recorded(tmp_path / "record", [0.0])
    before = {path: path.read_bytes() for path in folder.rglob("*")}
    monkeypatch.setattr(cli, "_enable_compilation_cache", lambda: None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["toolkit", "compare", "record", "--recorded"])
    cli.main()
    assert "page: runs/pages/record/index.html" in capsys.readouterr().out
    assert Path("runs/pages/record/index.html").exists()
    assert {path: path.read_bytes() for path in folder.rglob("*")} == before


def test_the_page_in_the_docs_says_what_its_record_says():
    folder = Path(__file__).parents[2] / "data/comparisons/looped-hybrid"
    comparison, tried, lines = load_comparison(folder)
    best = comparison.best_rates(tried)
    assert best == {label: comparison.grid(label)[-1] for label in comparison.contenders}
    assert comparison.rates == 3
    for run in comparison.contenders.values():
        assert (run.steps, run.batch * run.sequence_length, run.config.vocabulary) == (
            200, 1024, 512,
        )  # fmt: skip
    final = comparison.final(best)
    (verdict,) = final.verdicts(results_of(lines, final))
    assert (verdict.word, verdict.seeds) == ("not shown", 8)
    assert verdict.interval[0] < 0 < verdict.interval[1]
    assert np.mean(verdict.interval) == pytest.approx(0.055, abs=5e-4)
    text = (folder.parents[2] / "docs/compare.md").read_text()
    assert "*not shown*: the mean difference of 0.055 bits per byte" in " ".join(text.split())


def test_the_page_in_the_docs_says_what_the_record_of_loops_says():
    folder = Path(__file__).parents[2] / "data/comparisons/looped"
    comparison, tried, lines = load_comparison(folder)
    best = comparison.best_rates(tried)
    assert best == {"plain": 0.024, "looped": 0.012}
    for label, rate in best.items():
        assert rate in comparison.grid(label)[1:-1]
        assert len(comparison.grid(label)) == 5
    plain, looped = (comparison.contenders[label].config for label in ("plain", "looped"))
    assert (plain.pattern, looped.pattern, looped.loops) == ("full full full full", "full full", 2)
    assert parameter_count(looped) / parameter_count(plain) == pytest.approx(0.57, abs=5e-3)
    assert flops_per_token(looped, 128) == pytest.approx(flops_per_token(plain, 128), rel=0.01)
    final = comparison.final(best)
    (verdict,) = final.verdicts(results_of(lines, final))
    assert (verdict.word, verdict.seeds) == ("contradicted", 8)
    assert verdict.interval == pytest.approx((-0.128, -0.005), abs=5e-4)
    assert np.mean(verdict.interval) == pytest.approx(-0.066, abs=5e-4)


def test_runs_at_other_rates_are_set_aside(tmp_path):
    folder = recorded(tmp_path / "folder", [0.0])
    comparison = load_comparison(folder)[0]
    best = {"plain": 0.003, "looped": 0.0015}
    _set_aside_other_rates(comparison.final(best), folder)
    assert (folder / RUNS).exists()  # the control: these rates
    _set_aside_other_rates(comparison.final(best | {"looped": 0.006}), folder)
    assert not (folder / RUNS).exists()
    assert (folder / "runs-before-1.jsonl").exists()


@pytest.mark.slow
def test_the_command_compares_resumes_and_refuses_other_settings(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "_enable_compilation_cache", lambda: None)
    monkeypatch.chdir(tmp_path)
    for name, pattern in (("plain", "window"), ("looped", "gdn")):
        Path(f"{name}.toml").write_text(
            f'steps = 10\nbatch = 1\nsequence_length = 8\n[looped]\npattern = "{pattern}"\n'
            "width = 8\nheads = 1\nfeed_forward = 8\n"
        )

    def compare(*words):
        argv = ["toolkit", "compare", "out", "plain.toml", "other=looped.toml", *words]
        monkeypatch.setattr(sys, "argv", [*argv, "--match", "training-flops", "--rates", "1"])
        cli.main()
        return capsys.readouterr().out

    first = compare("--seeds", "1")
    assert "Not shown: other has a lower held-out loss than plain (1 seeds" in first
    runs = Path("out", RUNS).read_text()
    again = compare("--seeds", "2")
    assert Path("out", RUNS).read_text().startswith(runs)  # goes on, and trains nothing again
    assert "(2 seeds" in again
    with pytest.raises(SystemExit):
        compare("--seeds", "2", "--set", "steps=11")
    assert "holds a comparison with other contenders" in capsys.readouterr().err
