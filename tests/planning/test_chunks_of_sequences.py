"""Slices, chunks and what they keep: InfiniPipe's golden values and properties."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.planning import (
    best_slices,
    chunk_sequences,
    equal_time_cuts,
    keep_layers,
    sliced_seconds,
)

ROUNDING = 1e-9
COSTS = {"quadratic": 0.01, "linear": 0.5}
AGAIN = [1, 1.3, 1.6, 1.9]


def test_golden_slices():
    ends = equal_time_cuts(64, 4, **COSTS)
    assert ends == pytest.approx((24.4874, 40.3682, 53.0833, 64), abs=1e-4)
    steps = [sliced_seconds(72.96, k, stages=4, overhead=0.6) for k in (1, 2, 4, 8, 16, 32)]
    assert steps == pytest.approx([73.56, 46.35, 32.97, 26.73, 24.51, 25.20], abs=0.005)
    assert best_slices(72.96, stages=4, overhead=0.6) == 19
    assert best_slices(72.96, stages=1, overhead=0.6) == 1


@given(st.floats(0, 1), st.floats(0.01, 5), st.floats(1, 1e6), st.integers(1, 40))
@settings(max_examples=50, deadline=None)
def test_slices_take_as_long(a, b, tokens, k):
    ends = equal_time_cuts(tokens, k, quadratic=a, linear=b)
    work = [a * t**2 + b * t for t in (0, *ends)]
    each = [y - x for x, y in itertools.pairwise(work)]
    assert max(each) - min(each) <= 1e-7 * work[-1] / k
    assert ends[-1] == tokens


def test_chunks_hold_every_token_once():
    lengths = [48.0, 16.0, 8.0, 4.0, 4.0, 2.0]
    found = chunk_sequences(lengths, stages=4, overhead=0.1, **COSTS)
    for number, tokens in enumerate(lengths):
        pieces = [piece for chunk in found.chunks for piece in chunk if piece[0] == number]
        assert [start for _, start, _ in pieces] == [0.0, *[end for *_, end in pieces[:-1]]]
        assert pieces[-1][2] == tokens
    packed = [chunk for chunk in found.chunks if len(chunk) > 1]
    assert all(sum(b - a for _, a, b in chunk) <= found.most_tokens + 1e-9 for chunk in packed)
    whole = [0.1 + 0.01 * s**2 + 0.5 * s for s in lengths]
    assert found.step < (sum(whole) + 3 * max(whole)) / 4  # uncut sequences, a control


def test_golden_chunks_that_keep():
    kept = [keep_layers([1.0] * 4, AGAIN, layers=8, in_flight=n, budget=16.0) for n in (4, 3, 2, 1)]
    assert kept[0] == ((0, 0, 8, 8), 18.4)
    assert kept[1] == ((8, 0, 8, 8), 10.4)
    assert sum(cost for _, cost in kept) == pytest.approx(28.8)
    # One number for all chunks of a stage.
    even = [sum(AGAIN) * (8 - min(8, 16 // n)) for n in (4, 3, 2, 1)]
    assert sum(even) == pytest.approx(23.2 + 17.4)
    unequal = keep_layers([1.0, 2.0, 3.0], [1, 2, 3.5], layers=3, in_flight=2, budget=7.0)
    best = min(
        sum(r * (3 - k) for r, k in zip([1, 2, 3.5], each, strict=True))
        for each in itertools.product(range(4), repeat=3)
        if each[0] + 2 * each[1] <= 7 and 2 * each[1] + 3 * each[2] <= 7
    )
    assert unequal[1] == pytest.approx(best)
    assert keep_layers([1.0], [2.0], layers=4, in_flight=1, budget=0.0) == ((0,), 8.0)


def test_what_is_no_chunk_is_refused():
    for call, words in (
        (lambda: equal_time_cuts(8, 0, **COSTS), "slices must be positive"),
        (lambda: equal_time_cuts(8, 2, quadratic=0, linear=0), "nor both 0"),
        (lambda: chunk_sequences([], stages=2, **COSTS), "shortest of lengths must be positive"),
        (lambda: keep_layers([1.0], [1.0], layers=0, in_flight=1, budget=1.0), "at least 1"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
