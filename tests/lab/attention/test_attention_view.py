"""Cost curves and memory: pure functions of the rows of MIXERS and a machine's two rates."""

import numpy as np
import pytest

from toolkit.bench.mixers.layer_costs import DECODE, KEPT, MIXER_NAMES, PREFILL, Point
from toolkit.lab.attention.cost_curves import TOKENS, Machine
from toolkit.lab.attention.instrument import costs, decode_memory

MACHINE = Machine("a machine", 1e11, 1e10, 4)
SIZES = {"context_length": 4096, "heads": 4, "head_size": 64, "window": 512}


def slope(curve: np.ndarray) -> float:
    """Growth exponent over the last doublings of the context."""
    return np.log(curve[-1] / curve[-5]) / np.log(TOKENS[-1] / TOKENS[-5])


def test_prefill_is_quadratic_only_for_full_softmax() -> None:
    curves = costs(machine=MACHINE, unit="FLOP", **SIZES).curves[PREFILL]
    assert slope(curves["full"]) == pytest.approx(2, abs=0.01)
    assert slope(curves["window"]) == pytest.approx(1, abs=0.01)
    assert slope(curves["gdn"]) == pytest.approx(1, abs=0.01)


def test_decode_grows_only_for_full_softmax() -> None:
    curves = costs(machine=MACHINE, unit="bytes", **SIZES).curves[DECODE]
    assert slope(curves["full"]) == pytest.approx(1, abs=0.01)
    assert slope(curves["window"]) == slope(curves["gdn"]) == 0


@pytest.mark.parametrize(
    ("phase", "head_size", "they_cross"),
    [(PREFILL, 64, True), (PREFILL, 256, True), (DECODE, 64, False), (DECODE, 256, True)],
)
def test_where_the_lines_cross(phase: str, head_size: int, they_cross: bool) -> None:
    view = costs(machine=MACHINE, unit="seconds", **SIZES | {"head_size": head_size})
    softmax, delta = view.curves[phase]["full"], view.curves[phase]["gdn"]
    assert (softmax[0] < delta[0]) == they_cross
    assert softmax[-1] > delta[-1]


def test_time_is_the_roofline_of_operations_and_bytes() -> None:
    by_unit = {unit: costs(machine=MACHINE, unit=unit, **SIZES) for unit in ("FLOP", "bytes")}
    time = costs(machine=MACHINE, unit="seconds", **SIZES)
    for phase in (PREFILL, DECODE):
        for name in MIXER_NAMES:
            flop, moved = (by_unit[unit].curves[phase][name] for unit in ("FLOP", "bytes"))
            expected = np.maximum(flop / 1e11, moved / 1e10)
            np.testing.assert_allclose(time.curves[phase][name], expected)


def test_dense_softmax_moves_its_scores() -> None:
    dense, blocks = (
        costs(machine=MACHINE, unit="bytes", softmax=softmax, **SIZES)
        for softmax in ("dense", "blockwise")
    )
    assert dense.cost(PREFILL, "full") - blocks.cost(PREFILL, "full") == 8 * 4 * 4096**2
    assert dense.cost(PREFILL, "gdn") == blocks.cost(PREFILL, "gdn")
    assert all(dense.cost(DECODE, name) == blocks.cost(DECODE, name) for name in MIXER_NAMES)


def test_larger_chunks_cost_more_operations_in_prefill_only() -> None:
    small, large = (
        costs(machine=MACHINE, unit="FLOP", chunk=chunk, **SIZES) for chunk in (32, 256)
    )
    assert small.cost(PREFILL, "gdn") < large.cost(PREFILL, "gdn")
    assert small.cost(PREFILL, "full") == large.cost(PREFILL, "full")
    assert all(small.cost(DECODE, name) == large.cost(DECODE, name) for name in MIXER_NAMES)


def test_measured_points_belong_to_time_only() -> None:
    points = (Point("full", PREFILL, 256, 1e-3, 1e-5),)
    assert costs(machine=MACHINE, measured=points, **SIZES).measured == points
    assert costs(machine=MACHINE, measured=points, unit="FLOP", **SIZES).measured == ()


def test_cost_sentence_and_table_name_kind_and_values() -> None:
    points = (Point("full", DECODE, 256, 1e-4, 1e-6), Point("gdn", DECODE, 256, 2e-5, 1e-6))
    view = costs(machine=MACHINE, measured=points, **SIZES)
    assert "At 4,096 tokens" in view.sentence()
    assert "Modelled for a machine." in view.sentence()
    assert "Measured here at 256 tokens: decode 100 µs ± 500 ns against 20.0" in view.sentence()
    columns, rows = view.table()
    assert columns[7:] == (
        "decode, full softmax, measured", "decode, gated delta net, measured",
    )  # fmt: skip
    assert all(len(row) == len(columns) for row in rows)
    (measured,) = (row for row in rows if row[0] == "256")
    assert measured[7:] == ("100 µs ± 500 ns", "20.0 µs ± 500 ns")
    assert rows[-1][7:] == ("–", "–")


def test_a_context_that_was_only_measured_has_a_row_of_its_own() -> None:
    view = costs(machine=MACHINE, measured=(Point("full", PREFILL, 100, 1e-3, 0.0),), **SIZES)
    first = view.table().rows[0]
    assert (first[0], first[-1]) == ("100", "1.00 ms ± 0 ns")
    assert "–" not in first


MEMORY = {
    "heads": 8,
    "head_size": 128,
    "window": 1024,
    "layers": 32,
    "sequences": 8,
    "bytes_per_number": 2,
    "capacity_bytes": 80e9,
    "capacity_name": "H100",
}


def test_memory_of_cache_and_state() -> None:
    view = decode_memory(context_length=32768, **MEMORY)
    per_token = 2 * 8 * 128 * 2  # keys and values, heads, size, bytes
    assert view.cost(KEPT, "full") == 32 * 8 * 32768 * per_token
    assert view.cost(KEPT, "window") == 32 * 8 * 1024 * per_token
    assert view.cost(KEPT, "gdn") == 32 * 8 * 8 * 128 * 128 * 4
    assert "At 32,768 tokens" in view.sentence()
    assert "the cache is 256× the state" in view.sentence()


def test_memory_says_when_the_cache_no_longer_fits() -> None:
    assert "no longer fits one H100" in decode_memory(context_length=1 << 20, **MEMORY).sentence()
    assert "fills 43% of one H100" in decode_memory(context_length=32768, **MEMORY).sentence()
    assert (
        "the state is"
        in decode_memory(context_length=128, **MEMORY | {"head_size": 256}).sentence()
    )
