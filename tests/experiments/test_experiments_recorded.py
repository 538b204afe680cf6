"""The results kept in the repository: every one can still be read, judged and drawn."""

import dataclasses
import itertools
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from toolkit.cli import commands as cli
from toolkit.experiments import EXPERIMENTS, load_experiment, power
from toolkit.experiments.kit.records import is_changed, read_runs, results_of
from toolkit.experiments.kit.results import Results
from toolkit.experiments.kit.verdicts import LEAST_SEEDS
from toolkit.experiments.lr.transfer_rules import RULES
from toolkit.experiments.words import LONGER

WORDS = "seen|contradicted|no difference that matters|not shown|void"
RECORDED = sorted((Path(__file__).parents[2] / "data/experiments").glob("*.jsonl"))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_results_are_shown_by_the_command(path, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "_enable_compilation_cache", lambda: None)
    command = ["toolkit", "experiment", path.stem, "--recorded", path, "--directory", tmp_path]
    monkeypatch.setattr("sys.argv", [str(word) for word in command])
    cli.main()
    out = capsys.readouterr().out
    assert "recorded:" in out
    for claim in load_experiment(path.stem).claims:
        assert re.search(rf"^({WORDS}) +{re.escape(claim.text)}", out, re.M)
    assert (tmp_path / "figure.png").stat().st_size > 10_000


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_results_are_of_every_setting_with_provenance_and_verdicts_by_the_rule(path):
    experiment = load_experiment(path.stem)
    lines = read_runs(path, experiment)
    results = results_of(lines, experiment)
    # A report of its own names the settings that were not run; a table would hide them.
    is_whole = set(results.labels) == set(experiment.settings)
    assert is_whole or (experiment.report and set(results.labels) < set(experiment.settings))
    assert len({(line["label"], line["seed"]) for line in lines}) == len(lines)
    for line in lines:
        assert set(line["environment"]) == {"device", "versions", "commit", "date", "command"}
        assert line["setting"] or is_changed(line["environment"]["commit"])
    for claim, verdict in zip(experiment.claims, experiment.verdicts(results), strict=True):
        assert verdict.seeds
        assert claim.seeds >= LEAST_SEEDS
        assert (verdict.interval is None) == (
            verdict.seeds < claim.seeds or " to be run again on one" in str(verdict)
        )
        assert verdict.interval or verdict.word == "not shown"


def test_what_the_notebook_on_latents_says_of_the_record():
    experiment, folder = load_experiment("latent"), RECORDED[0].parent
    results = results_of(read_runs(folder / "latent.jsonl", experiment), experiment)
    for label, share in {
        "g=2, PCA, exact norm": 0.94, "g=2, no basis, exact norm": 0.8,
        "g=4, PCA, exact norm": 0.88, "g=4, no basis, exact norm": 0.71, "DCP, 4 devices": 1,
    }.items():  # fmt: skip
        assert results.mean(label, "same token") == pytest.approx(share, abs=0.005)


def recorded(name):
    experiment = load_experiment(name)
    results = results_of(read_runs(RECORDED[0].parent / f"{name}.jsonl", experiment), experiment)
    return results, experiment.verdicts(results)


def test_what_the_page_of_results_says_of_hybrids():
    both = ["looped", "looped full + gdn"]
    looped, hybrid = recorded("language")[0].paired("perplexity", both)
    gap = looped - hybrid
    effect = gap.mean() / gap.std(ddof=1)
    assert effect == pytest.approx(0.81, abs=0.005)
    (claim,) = load_experiment("hybrid").claims
    assert claim.smallest == 0.01
    excess = effect - claim.smallest / gap.std(ddof=1)
    assert power(claim.seeds, excess, draws=1000) == pytest.approx(0.85, abs=0.02)
    results, (verdict,) = recorded("hybrid")
    assert (verdict.word, verdict.agreeing, verdict.seeds) == ("not shown", 9, 20)
    assert verdict.interval == pytest.approx((-0.038, 0.048), abs=5e-4)
    looped, hybrid = results.paired("perplexity", both)
    assert (looped - hybrid).mean() == pytest.approx(0.005, abs=5e-4)

    recipes = load_experiment("overflow").settings.values()
    assert {(recipe.task.pairs, recipe.steps) for recipe in recipes} == {(32, 3_000)}
    results, verdicts = recorded("overflow")
    words = [verdict.word for verdict in verdicts]
    assert words == ["not shown", "not shown", "seen", "seen", "not shown", "not shown"]
    assert min(results.samples("gdn + full, keys of 8", "accuracy")) > 0.999
    for label, mean in {"gdn, keys of 8": 0.1, "full": 0.84, "gdn, keys of 64": 0.81}.items():
        assert results.mean(label, "accuracy") == pytest.approx(mean, abs=0.005)


def test_what_the_page_of_results_says_of_controls():
    claims = {name: load_experiment(name).claims for name in EXPERIMENTS}
    without = {name: sum(claim.control is None for claim in each) for name, each in claims.items()}
    assert {name: count for name, count in without.items() if count} == {
        "sparse": 22, "convert": 1, "probes": 1,
    }  # fmt: skip
    assert sum(without.values()) == 24
    late = [verdict for name in ("needle", "parity", "swaps", "s3", "mqar", "convert", "language",
                                 "probes") for verdict in recorded(name)[1]]  # fmt: skip
    assert "void" not in {verdict.word for verdict in late}
    assert "void" not in {verdict.word for verdict in recorded("sparse")[1][:10]}


def test_what_the_page_of_results_says_of_words():
    results, verdicts = recorded("words")
    words = [verdict.word for verdict in verdicts]
    assert words == ["not shown", "void", "not shown", "not shown", "void"]
    beyond = {
        label: np.array(results.samples(label, "accuracy, longer")) for label in results.labels
    }
    assert (beyond["parity: gdn, beta up to 2"] > 0.9).sum() == 3
    assert (beyond["S3: delta product"] > 0.9).sum() == 2
    for label, chance in {
        "parity: gdn, beta up to 1": 1 / 2, "parity: full": 1 / 2,
        "S3: gdn, beta up to 1": 1 / 6, "S3: gdn, beta up to 2": 1 / 3,  # two signs of three each
    }.items():  # fmt: skip
        np.testing.assert_allclose(beyond[label], chance, atol=0.01)
    recipes = load_experiment("words").settings
    parity, s3 = recipes["parity: full"], recipes["S3: delta product"]
    assert (parity.task.length, LONGER["Z2"], parity.steps) == (40, 256, 20_000 / 5)
    assert (s3.task.length, LONGER["S3"]) == (128, 512)
    assert s3.steps == pytest.approx(4_900 * 2 / 5, rel=0.03)


def test_what_the_page_of_results_says_of_two_looks():
    experiment, (results, verdicts) = load_experiment("sparse"), recorded("sparse")

    def words(first, last):
        """Of all claims, by these seeds alone; those that plan 24 judged by the 12 there are."""
        runs = {
            label: {seed - first: run for seed, run in of_label.items() if first <= seed < last}
            for label, of_label in results.outcomes.items()
        }
        return {
            claim.text: dataclasses.replace(claim, seeds=min(claim.seeds, last - first))
            .verdict(Results(runs), len(experiment.claims)).word
            for claim in experiment.claims if claim.seeds in (12, 24)
        }  # fmt: skip

    (twice,) = (claim.text for claim in experiment.claims if claim.seeds == 24)
    assert "what drops tokens before it sees the query loses quotations" in twice
    first, second = words(0, 12), words(12, 24)
    both = {verdict.claim: verdict.word for verdict in verdicts if verdict.claim in first}
    assert [found[twice] for found in (first, second, both)] == ["not shown", "not shown", "seen"]
    changed = [text for text in first if first[text] != both[text] and text != twice]
    assert len(changed) == 27
    assert {first[text] for text in changed} == {"void"}
    assert "void" not in {both[text] for text in changed}
    assert {len(results.outcomes[label]) for label in ("random, text", "oracle, text")} == {24}


def test_what_the_page_of_results_says_is_left_to_run():
    folder = RECORDED[0].parent
    transfer = load_experiment("transfer")
    assert transfer.minutes == 520
    runs = read_runs(folder / "transfer.jsonl", transfer)
    counts = Counter(line["label"] for line in runs)
    assert [counts[f"{rule}: 512 x 2"] for rule in RULES] == [5, 5, 0, 0, 0]
    without = {rule for rule in RULES if not counts[f"{rule}: 64 x 16"]}
    assert without == {"long warm-up", "muP, coupled"}
    assert not [rule for rule in RULES if counts[f"{rule}: 512 x 16"] < 5]


def test_what_the_page_on_serving_says_of_the_record():
    experiment = load_experiment("serving")
    lines = read_runs(RECORDED[0].parent / "serving.jsonl", experiment)
    results = results_of(lines, experiment)
    found = {(v.claim.partition(":")[0], v.word): v.seeds for v in experiment.verdicts(results)}
    assert set(found.values()) == {8}
    seen = {"TIE", "PBKV", "SART", "DARTS", "DistServe"}
    assert found.keys() == {
        *((system, "seen") for system in seen),
        ("TIE", "contradicted"), ("PBKV", "contradicted"),
        ("DistServe", "no difference that matters"), ("OServe", "not shown"),
    }  # fmt: skip
    for name, values in {
        "mean wait": {"TIE, expected": 500, "TIE, median": 557},
        "hits": {"PBKV, predicted": 0.35, "PBKV, lru": 0.23},
        "time": {"SART, 8": 0.57, "SART, 4": 2.19},
        "requests within bounds": {"DistServe, split": 0.999, "DistServe, joint": 0.085},
    }.items():
        for label, value in values.items():
            assert results.mean(label, name) == pytest.approx(value, rel=0.01)
    assert results.mean("SART, 8", "tokens") <= results.mean("SART, 4", "tokens")
    gain = results.mean("OServe, unlike", "load over that of like replicas") - 1
    assert gain == pytest.approx(0.03, abs=5e-3)
    assert results.mean("DARTS, adapted", "slowest prompt over even") == pytest.approx(
        0.43, abs=0.01
    )
    assert results.mean("TIE, tail", "mean wait") > results.mean("TIE, expected", "mean wait")


def test_what_the_page_on_sharding_says_of_gradients():
    experiment = load_experiment("gradients")
    lines = read_runs(RECORDED[0].parent / "gradients.jsonl", experiment)
    largest, signs, four_bits, *_ = experiment.verdicts(results_of(lines, experiment))
    assert [verdict.word for verdict in (largest, signs, four_bits)] == ["seen"] * 3
    assert largest.interval[0] > 0.17
    assert "the largest 1 %" in largest.claim
    assert signs.interval[0] > 0.26
    assert "to 0.02 nats" in four_bits.claim


def test_what_a_docstring_says_of_tails_is_in_the_record():
    """Smaller errors where chance fails, and no more needles: why they are off unless asked for."""
    experiment = load_experiment("sparse")
    lines = read_runs(RECORDED[0].parent / "sparse.jsonl", experiment)
    results = results_of([line for line in lines if line["seed"] < LEAST_SEEDS], experiment)
    for system, tokens in itertools.product(("quest", "tactic", "hata", "pqcache"), (64, 256)):
        plain, tail, chance = (
            {
                kind: results.mean(label, f"{kind}, {tokens} tokens")
                for kind in ("error", "accuracy")
            }
            for label in (system, f"{system}, tail", "random")
        )
        assert tail["error"] < plain["error"]
        assert abs(tail["accuracy"] - plain["accuracy"]) < 0.01
        assert chance["accuracy"] < plain["accuracy"] - 0.3
    results = results_of(lines, experiment)
    for system in ("hata", "pqcache"):
        drops = []
        for heads in ("1 query head", "4 query heads", "8 query heads"):
            for number in ("error", "perplexity"):
                labels = [f"{system}, text", f"{system}, text, tail"]
                plain, tail = results.paired(f"{number}, code, {heads}", labels).mean(1)
                drops.append(1 - tail / plain)
        assert np.mean(drops[::2]) > 1 / 3
        assert max(map(abs, drops[1::2])) < 0.02
    for system in ("hata", "pqcache", "quest"):
        kinds = "4 query heads", "4 query heads, without a tail"
        tail, plain = (
            {number: results.mean(f"{system}, text, tail", f"{number}, {kind}")
             for number in ("error", "accuracy")}
            for kind in kinds
        )  # fmt: skip
        assert tail["error"] < plain["error"]
        assert abs(tail["accuracy"] - plain["accuracy"]) < 0.01


def test_what_a_docstring_says_of_pages_is_in_the_record():
    experiment, folder = load_experiment("sparse"), RECORDED[0].parent
    results = results_of(read_runs(folder / "sparse.jsonl", experiment), experiment)
    for heads in ("1 query head", "4 query heads", "8 query heads"):
        labels = ["quest, text", "random, text", "hata, text"]
        pages, chance, hashes = results.paired(f"mass, code, {heads}", labels).mean(1)
        assert pages < 1.1 * chance < 0.6 * hashes
