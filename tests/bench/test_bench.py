"""The bench harness: no ratio on a red check, a record for every contender."""

import time
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest

from toolkit.attention.latent import PRESETS
from toolkit.bench import SUITES, Case, Yardstick, agree, run_case, run_suites
from toolkit.bench.mixers import steps as mixer_steps
from toolkit.bench.mixers.kernel_floors import floors_page
from toolkit.bench.mixers.steps import latent_case, shard_case, shard_work
from toolkit.measure import UncheckedRatioError, read_records


def case(wrong: float) -> Case:
    return Case(
        name="add one",
        contenders={"ours": lambda: jnp.ones(4) + 1, "peer": lambda: jnp.full(4, 2.0 + wrong)},
        check=agree(1e-6),
        ours="ours",
        targets={"peer": 0.0},
    )


def test_contenders_that_agree_are_timed_and_recorded(capsys):
    records = run_case(case(0.0), rounds=3, cores=1)
    assert "x the time of ours" in capsys.readouterr().out
    assert [r.kind for r in records] == ["measured", "measured"]
    assert all(len(r.samples) == 3 for r in records)


def test_the_page_of_floors_is_what_the_formulas_say():
    page = Path(__file__).parents[2] / "docs/kernels.md"
    assert page.read_text(encoding="utf-8") == floors_page() + "\n", (
        "run: python -m toolkit.bench.mixers.kernel_floors > docs/kernels.md"
    )


def test_contenders_that_disagree_get_no_ratio():
    with pytest.raises(UncheckedRatioError, match="disagree"):
        run_case(case(0.1), rounds=1, cores=1)


def test_a_contender_alone_that_fails_its_check_gets_no_figure(capsys):
    def check(results):
        raise ValueError("not a picture")

    alone = Case(name="draw", contenders={"ours": lambda: 0}, check=check, ours="ours")
    with pytest.raises(UncheckedRatioError, match="not a picture"):
        run_case(alone, rounds=1, cores=1)
    assert capsys.readouterr().out == ""


def test_ours_is_held_against_the_machine_and_the_floor(capsys):
    stick = Yardstick("rate", lambda: "not compared", work=4.0, ours=1.0, unit="FLOP", least=2.0)
    assert stick.fraction(our_seconds=0.5, call_seconds=1.0) == 0.5
    parts = {"a part": lambda: "not compared either"}
    whole = replace(case(0.0), yardstick=stick, parts=parts, floor=1e-30)
    records = run_case(whole, rounds=1, cores=1)
    printed = capsys.readouterr().out
    assert "of rate   (wanted >= 200%: NOT reached)" in printed
    assert "0% of the modelled floor" in printed
    names = [r.name.removeprefix("add one | 1 cores | ") for r in records]
    assert names == ["ours", "peer", "a part", "rate", "fraction of floor", "fraction of rate"]
    assert [r.check for r in records[:4]] == ["passed", "passed", "absent", "absent"]
    assert "% of the time of ours" in printed


def test_growth_is_judged_from_one_size_to_the_next(capsys):
    sizes = {"ours": lambda: time.sleep(0.02), "peer": lambda: time.sleep(0.2)}
    growing = Case(
        name="sleep",
        contenders=sizes,
        check=lambda results: None,
        ours="peer",
        growth=2.1,
        facts=lambda: {"ours": {"memory": (100, "byte")}, "peer": {"memory": (200, "byte")}},
    )
    records = run_case(growing, rounds=1, cores=1)
    lines = capsys.readouterr().out.splitlines()
    assert "the one before   (wanted <= 2.1: NOT reached)" in lines[-2]
    assert lines[-1].endswith("memory 200 byte   2.00x the one before   (wanted <= 2.1: reached)")
    assert [r.unit for r in records] == ["s", "byte", "s", "byte"]


def test_unknown_suite_and_bad_rounds_are_refused():
    with pytest.raises(ValueError, match="nothing"):
        run_suites(["nothing"])
    with pytest.raises(ValueError, match="rounds"):
        run_suites(["gdn"], rounds=0)
    with pytest.raises(ValueError, match="only suite mixers has a figure; got gdn"):
        run_suites(["gdn"], plot=True)


@pytest.mark.nightly
def test_a_suite_runs_and_writes_its_record(tmp_path):
    assert "startup" in SUITES
    run_suites(["startup"], rounds=1, out=tmp_path)
    records = read_records(tmp_path / "startup.json")
    assert {r.name.split(" | ")[-1] for r in records} == {"import toolkit", "import jax"}


@pytest.mark.nightly
@pytest.mark.oracle
def test_a_training_step_is_that_of_plain_jax_and_of_pytorch():
    pytest.importorskip("transformers")
    from toolkit.bench import training

    case = training._case(1, 32, 2, "small")
    case.check({name: call() for name, call in case.contenders.items()})
    with pytest.raises(ValueError, match="'plain JAX' has loss"):  # a step behind the others
        case.check({**{name: call() for name, call in case.contenders.items()}, "plain JAX": 5.0})


def test_a_device_reads_less_the_more_slices_there_are(monkeypatch):
    works = [shard_work(slices, 1, 1000) for slices in mixer_steps.SLICES]
    assert [round(work.bytes / 2000) for work in works] == [593, 338, 212, 153]
    monkeypatch.setattr(mixer_steps, "COPIED", 1 << 10)
    case = shard_case(8, 1, 24, "float32", False, "small")
    case.check({name: call() for name, call in case.contenders.items()})
    assert mixer_steps.KERNEL not in case.contenders  # which this machine does not run


def test_a_step_of_latent_attention_is_the_expanded_one():
    config = replace(
        PRESETS["deepseek_v2_lite"], width=32, heads=2, latent_size=16, key_size=8, value_size=8
    )
    case = latent_case(config, 32, "small")
    case.check({name: call() for name, call in case.contenders.items()})
    assert case.yardstick is not None
    assert case.yardstick.work > 4 * 32 * (16 + config.rope_size)
