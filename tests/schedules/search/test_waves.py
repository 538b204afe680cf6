"""Spindle's waves: golden times, the bound, and waves as a shape of the same searches."""

import itertools

import pytest

from toolkit.schedules.search import (
    find_repetend,
    search_schedule,
    wave_bound,
    wave_plan,
    wave_shape,
)

ROUNDING = 1e-9
TIMES = [lambda n, w=w, e=e: w * n**-e for w, e in ((12, 0.95), (6, 0.8), (3, 0.6), (3, 0.9))]


def test_the_continuous_problem_is_the_golden_one():
    bound, shares = wave_bound(TIMES, 8)
    assert bound == pytest.approx(3.214568, abs=1e-6)
    assert shares == pytest.approx((4.001, 2.182, 0.891, 0.926), abs=1e-3)
    assert sum(shares) == pytest.approx(8, abs=1e-6)
    # Where speed grows as the devices do, the bound is the work over the devices.
    assert wave_bound([lambda n: 5 / n, lambda n: 11 / n], 4)[0] == pytest.approx(4)


def test_waves_do_all_the_work_between_the_bound_and_one_wave():
    waves = wave_plan(TIMES, 8)
    one = min(
        max(t(n) for t, n in zip(TIMES, each, strict=True))
        for each in itertools.product((1, 2, 4, 8), repeat=4)
        if sum(each) <= 8
    )
    assert one == pytest.approx(3.4461, abs=1e-4)
    took = sum(wave.seconds for wave in waves)
    assert 3.214568 <= took < one  # one after another on all devices takes 4.1243
    for task, time in enumerate(TIMES):
        assert sum(wave.work[task] for wave in waves) == pytest.approx(1, abs=ROUNDING)
        for wave in waves:
            if wave.devices[task]:
                assert wave.work[task] * time(wave.devices[task]) <= wave.seconds + ROUNDING
    assert all(sum(wave.devices) <= 8 for wave in waves)


def test_waves_are_searched_as_any_shape():
    levels = [wave_plan(TIMES, 8), wave_plan([lambda n: 4 / n], 8)]
    shape = wave_shape(levels, unit=0.5)
    assert sum(block.memory for block in shape) == 0
    found = search_schedule(shape, 3, memory=9, seconds=2)
    assert found.faults(9) == []
    assert found.makespan >= found.bound
    steady = find_repetend(wave_shape(levels, unit=0.5, backward=0), 9, seconds=5)
    assert steady is not None
    assert steady.period == steady.bound


def test_what_is_no_wave_is_refused():
    with pytest.raises(ValueError, match="got 3 tasks, wanted at most one per device, 2"):
        wave_plan(TIMES[:3], 2)
    with pytest.raises(ValueError, match="unit must be positive"):
        wave_shape([], unit=0.0)
