"""The timing harness: order, repetition, checks and refusals."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from toolkit.measure import (
    Timing,
    UncheckedRatioError,
    interquartile_range,
    speedup,
    time_contenders,
)


def equal(results):
    first, *others = results.values()
    assert all(other == first for other in others), "results differ"


def test_contenders_take_turns_and_the_first_place_moves():
    calls = []
    names = ("a", "b", "c")
    contenders = {name: (lambda name=name: calls.append(name)) for name in names}
    time_contenders(contenders, rounds=3, warmup=1, min_seconds=0.0)
    # One call each for the check, the warm-up and the estimate, then three rounds.
    assert "".join(calls) == "abc" * 3 + "abc" + "bca" + "cab"


def test_the_check_comes_before_everything_and_sees_the_results():
    calls = []

    def check(results):
        assert results == {"one": 1, "two": 2}
        calls.append("check")

    contenders = {
        "one": lambda: calls.append("call") or 1,
        "two": lambda: calls.append("call") or 2,
    }
    timings = time_contenders(contenders, rounds=1, warmup=0, min_seconds=0.0, check=check)
    assert calls[:3] == ["call", "call", "check"]
    assert timings["one"].check == "passed"


def test_slower_is_slower_and_samples_are_kept():
    timings = time_contenders(
        {"fast": lambda: time.sleep(0.001), "slow": lambda: time.sleep(0.05)},
        rounds=5,
        min_seconds=0.0,
        check=equal,
    )
    assert list(timings) == ["fast", "slow"]
    assert timings["slow"].median >= 0.05
    assert len(timings["slow"].samples) == len(timings["slow"].cpu_samples) == 5
    assert timings["slow"].cpu_median < timings["slow"].median  # sleeping costs no processor time
    assert speedup(timings, "fast", "slow") > 2
    assert "measured here" in str(timings["fast"])


def test_short_calls_are_repeated():
    timings = time_contenders({"nothing": lambda: None}, rounds=2, min_seconds=0.002)
    assert timings["nothing"].repetitions > 10
    assert timings["nothing"].median < 1e-3


def test_results_in_pytrees_are_waited_for():
    program = jax.jit(lambda x: {"sum": x.sum(), "pair": (x, 2 * x)})
    array = jnp.ones((8, 8))
    timings = time_contenders({"jax": lambda: program(array)}, rounds=2, min_seconds=0.0)
    assert timings["jax"].median > 0


@pytest.mark.oracle
def test_torch_results_pass_through():
    torch = pytest.importorskip("torch")
    array = torch.ones(4)
    timings = time_contenders({"torch": lambda: array + 1}, rounds=2, min_seconds=0.0)
    assert timings["torch"].median > 0


def test_no_ratio_without_a_check():
    timings = time_contenders({"a": int, "b": int}, rounds=1, min_seconds=0.0)
    with pytest.raises(UncheckedRatioError, match="absent"):
        speedup(timings, "a", "b")


@pytest.mark.parametrize("no", [False, np.False_])
def test_a_check_that_returns_false_has_failed(no):
    timings = time_contenders({"a": int, "b": int}, rounds=1, min_seconds=0, check=lambda _: no)
    with pytest.raises(UncheckedRatioError, match="the check returned False"):
        speedup(timings, "a", "b")


def test_no_ratio_after_a_failed_check_and_the_reason_is_told():
    timings = time_contenders(
        {"a": lambda: 1, "b": lambda: 2}, rounds=1, min_seconds=0.0, check=equal
    )
    with pytest.raises(UncheckedRatioError, match="failed: AssertionError: results differ"):
        speedup(timings, "a", "b")


def test_ratio_is_that_of_the_medians():
    def timing(name, median):
        return Timing(name, median, 0.0, (median,), (median,), 1, "passed")

    timings = {"ours": timing("ours", 2.0), "peer": timing("peer", 3.0)}
    assert speedup(timings, "ours", "peer") == 1.5
    with pytest.raises(ValueError, match="'theirs' was not timed"):
        speedup(timings, "ours", "theirs")


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"warmup": -1}, {"min_seconds": float("nan")}])
def test_wrong_settings_are_named(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        time_contenders({"a": int}, **wrong)
    with pytest.raises(ValueError, match="contenders is empty"):
        time_contenders({})


def test_progress_bar_counts_rounds(capsys):
    time_contenders({"a": int}, rounds=2, min_seconds=0.0, progress=True)
    assert "2/2" in capsys.readouterr().err


def test_spread_ignores_one_outlier():
    assert interquartile_range([1.0, 2.0, 3.0, 4.0, 1000.0]) == 2.0
    assert interquartile_range([7.0]) == 0.0
