"""The bench harness: no ratio on a red check, a record for every contender."""

import jax.numpy as jnp
import pytest

from toolkit.bench import SUITES, Case, agree, run_case, run_suites
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


def test_unknown_suite_and_bad_rounds_are_refused():
    with pytest.raises(ValueError, match="nothing"):
        run_suites(["nothing"])
    with pytest.raises(ValueError, match="rounds"):
        run_suites(["gdn"], rounds=0)


@pytest.mark.slow
def test_a_suite_runs_and_writes_its_record(tmp_path):
    assert "startup" in SUITES
    run_suites(["startup"], rounds=1, out=tmp_path)
    records = read_records(tmp_path / "startup.json")
    assert {r.name.split(" | ")[-1] for r in records} == {"import toolkit", "import jax"}
