"""Sentences of lessons that hold a number or a comparison, beside what the package computes."""

import math

import ml_dtypes
import numpy as np
import pytest

from toolkit.attention import mixer
from toolkit.lab.lessons.catalogue import load_outline
from toolkit.lab.lessons.subjects.attention_memory import CHANNELS, _recall_errors
from toolkit.lab.lessons.subjects.programs import fewer_bits, real_trace
from toolkit.lab.lessons.subjects.programs.traces import busy_time, record

OF_ITS_SIZE = 0.1


def test_work_of_a_gated_delta_net_doubles_with_chunks_of_one_length_only():
    answer = load_outline("attention_cost").question("doubling").answer()
    row = mixer("gdn")
    sizes = (8, 64, 64)
    here = row.forward_flops(1, 8192, *sizes) / row.forward_flops(1, 4096, *sizes)
    fixed = row.forward_flops(1, 8192, *sizes, chunk=64) / row.forward_flops(
        1, 4096, *sizes, chunk=64
    )
    assert fixed == 2
    assert here > 2.1
    assert f"grows {here:.3g} times here" in answer.words


def test_a_sum_of_pairs_errs_by_half_at_a_quarter_of_its_channels_and_by_all_at_as_many():
    errors = _recall_errors()
    for pairs, words in ((CHANNELS // 4, 0.5), (CHANNELS, 1.0)):
        assert errors[pairs - 1] == pytest.approx(words, abs=OF_ITS_SIZE)
        assert errors[pairs - 1] == pytest.approx(
            math.sqrt((pairs - 1) / CHANNELS), abs=OF_ITS_SIZE
        )
    assert np.all(np.diff(errors) > -OF_ITS_SIZE)


def test_float8_is_that_of_jax_and_blocks_lose_what_an_outlier_hides():
    numbers = [*fewer_bits.ordinary(500), 0.0, 2.0**-9, 2.0**-10, 1e-9, 447.0, -448.0, 19.0]
    theirs = np.asarray(numbers, np.float32).astype(ml_dtypes.float8_e4m3fn).astype(float)
    assert [fewer_bits.as_e4m3(np.float32(x).item()) for x in numbers] == theirs.tolist()
    plain, spoilt = (
        fewer_bits.errors(f()) for f in (fewer_bits.ordinary, fewer_bits.with_outliers)
    )
    int8, e4m3, e5m2, blocks = plain
    assert max(plain[int8], plain[blocks]) < 0.01 < plain[e4m3] < plain[e5m2]
    assert spoilt[e4m3] < spoilt[e5m2] < spoilt[blocks] < spoilt[int8]
    a, b = (np.reshape(fewer_bits.ordinary(64 * 512, seed), (64, 512)) for seed in (1, 2))
    left, right = (
        x.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(float) for x in (a, b)
    )
    error = np.linalg.norm(left @ right.T - a @ b.T) / np.linalg.norm(a @ b.T)
    assert fewer_bits.product_errors()[e4m3] == pytest.approx(error)


@pytest.mark.slow
def test_a_trace_recorded_here_is_read_and_own_times_are_busy_times():
    trace = record(calls=3)
    assert trace.operations
    assert trace.python
    for lane in trace.lanes():
        spans = [(e.name, e.start, e.end) for e in trace.operations if e.lane == lane]
        assert sum(real_trace.own_times(spans).values()) == pytest.approx(busy_time(spans))
    assert 0 < busy_time(trace.spans()) < max(event.end for event in trace.operations)
    assert trace.picture().png[:4] == b"\x89PNG"
    assert "idle for" in real_trace.idle_by(busy_time, trace)
    assert real_trace.idle_by(lambda events: None, trace) == "write busy first"
