"""Sparse rows: nothing is lost, owners are balanced, bytes are the formula's."""

from functools import partial

import jax
import numpy as np
import pytest

from toolkit.measure import collectives
from toolkit.parallel import make_mesh
from toolkit.parallel.gradients import (
    RowOwners,
    dense_crossover,
    exchange_rows,
    row_bytes,
    row_capacity,
)

SUMS = 1e-5  # float32 in another order, of the largest sum
DEVICES, ROWS, WIDTH, TOKENS = 8, 4096, 16, 512
OWNERS = RowOwners.drawn(ROWS, DEVICES)


def zipf(seed=0, tokens=TOKENS, rows=ROWS, exponent=1.1):
    weights = np.arange(1, rows + 1.0) ** -exponent
    draws = np.random.default_rng(seed).choice(rows, (DEVICES, tokens), p=weights / weights.sum())
    return draws.astype(np.int32)


@pytest.fixture(scope="module")
def exchange():
    mesh = make_mesh({"data": DEVICES})

    @partial(jax.jit, static_argnames=("push", "pull"))
    def sums(ids, values, push, pull):
        def body(ids, values):
            found, report = exchange_rows(ids[0], values[0], OWNERS, "data", push=push, pull=pull)
            return found[None], jax.tree.map(lambda x: x[None], report)

        return jax.shard_map(
            body, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"), check_vma=False
        )(ids, values)

    return sums


def wanted(ids, values):
    table = np.zeros((ROWS, WIDTH))
    for row, value in zip(ids.reshape(-1), values.reshape(-1, WIDTH), strict=True):
        if 0 <= row < ROWS:
            table[row] += value
    return table


def close(found, exact):
    np.testing.assert_allclose(found, exact, rtol=0, atol=SUMS * max(1, np.abs(exact).max()))


def drawn(seed=0):
    return np.random.default_rng(seed).normal(size=(DEVICES, TOKENS, WIDTH)).astype(np.float32)


CASES = {
    "Zipf": zipf(),
    "the same row everywhere": np.full((DEVICES, TOKENS), 7, np.int32),
    "the last row": np.full((DEVICES, TOKENS), ROWS - 1, np.int32),
    "one device without a row": np.where(np.arange(DEVICES)[:, None] == 3, -1, zipf(1)),
    "ids beyond the table": np.where(np.arange(TOKENS) % 50 == 0, ROWS + 3, zipf(2)),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_are_the_dense_sum_on_every_replica(exchange, name):
    ids, values = CASES[name].astype(np.int32), drawn()
    found, report = exchange(ids, values, push=80, pull=200)
    close(found[0], wanted(ids, values))
    np.testing.assert_array_equal(found, np.broadcast_to(found[0], found.shape))
    assert int(report.push[0]) == int(report.pull[0]) == 0
    outside = (ids < 0) | (ids >= ROWS)
    np.testing.assert_array_equal(report.outside, outside.sum(axis=1))


@pytest.mark.parametrize(("push", "pull"), [(20, 200), (80, 100)])
def test_what_does_not_fit_is_counted_and_repaired(exchange, push, pull):
    ids, values = zipf(), drawn()
    found, report = exchange(ids, values, push=push, pull=pull)
    owner = OWNERS.places // OWNERS.slots
    pushed = [np.bincount(owner[np.unique(row)], minlength=DEVICES) for row in ids]
    pulled = np.bincount(owner[np.unique(ids)], minlength=DEVICES)
    assert int(report.push[0]) == np.maximum(np.stack(pushed) - push, 0).sum()
    if push == 80:
        assert int(report.pull[0]) == np.maximum(pulled - pull, 0).sum()
    assert int(report.push[0]) + int(report.pull[0]) > 0
    close(found[0], wanted(ids, values))


def test_bytes_are_the_formulas(exchange):
    compiled = exchange.lower(zipf(), drawn(), push=37, pull=151).compile()
    # The dense branch of the conditional is the one that would send most.
    branches = {(found.kind, found.bytes): found for found in collectives(compiled)}
    sent = sum(f.bytes_sent for f in branches.values() if f.bytes != 4 * ROWS * WIDTH)
    assert sent == 7 * 37 * (4 * WIDTH + 4) + 7 * 151 * 4 * WIDTH + 7 * ROWS / 8 / 8 + 14


def test_a_permutation_balances_what_ranges_do_not():
    rows, devices = 100_000, 64
    owners = RowOwners.drawn(rows, devices, seed=1)
    assert sorted(owners.places) == [*range(rows)]
    np.testing.assert_array_equal(owners.places, RowOwners.drawn(rows, devices, seed=1).places)
    touched = np.unique(zipf(0, 12_000, rows)[0])

    def skew(owner):
        return np.bincount(owner, minlength=devices).max() * devices / len(touched)

    assert skew(touched // owners.slots) > 3
    assert skew(owners.places[touched] // owners.slots) < 1 + 4 * np.sqrt(devices / len(touched))
    most = row_capacity(len(touched), devices)
    assert np.bincount(owners.places[touched] // owners.slots).max() <= most


@pytest.mark.parametrize(
    ("devices", "density", "full", "golden"),
    [
        (16, 0.01, False, (1.875, 0.300, 0.2931, 0.2973, 0.1873)),
        (16, 0.05, False, (1.875, 1.5, 1.339, 1.144, 0.648)),
        (16, 0.05, True, (1.875, 1.5, 0.4, 0.1875, 0.170)),
    ],
)
def test_golden_bytes_of_the_taxonomy(devices, density, full, golden):
    union = (lambda replicas: density) if full else None
    schemes = ("dense", "gather", "hierarchy", "partitioned", "rows")
    found = [row_bytes(s, devices, 1000, 1, density, union=union) / 4000 for s in schemes]
    np.testing.assert_allclose(found, golden, atol=6e-4)


def test_a_bitmap_beats_indices_from_one_in_thirty_two_on():
    for density in (0.01, 0.03, 0.033, 0.2):
        same = {"union": lambda replicas, density=density: density}
        bitmap, indices = (
            row_bytes(s, 8, 1000, 64, density, **same) for s in ("rows", "partitioned")
        )
        assert (bitmap < indices) == (density > 1 / 32)


def test_crossovers_with_dense():
    assert dense_crossover("gather", 64, 512) == pytest.approx(0.0312, rel=0.01)
    assert dense_crossover("hierarchy", 16, 512) == pytest.approx(0.183, rel=0.01)
    assert dense_crossover("rows", 8, 512) > 0.9
    assert dense_crossover("rows", 8, 512, push_skew=4.8, pull_skew=2.75) < 0.3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RowOwners.drawn(0, 8), "rows, devices: got 0 and 8"),
        (lambda: row_capacity(0, 8), "touched: got 0"),
        (lambda: row_bytes("ring", 8, 10, 4, 0.1), "scheme must be one of"),
        (lambda: row_bytes("rows", 8, 10, 4, 1.1), "density: got 1.1"),
        (lambda: row_bytes("hierarchy", 6, 10, 4, 0.1), "wanted a power of two"),
    ],
)
def test_what_no_rows_are_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_capacity_below_one_is_refused(exchange):
    with pytest.raises(ValueError, match="pull: got 0, wanted a capacity of at least 1"):
        exchange(zipf(), drawn(), push=1, pull=0)
