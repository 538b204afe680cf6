"""Caches are transactions: what is taken back was never there, what has no room is dropped.

Thousands of random operations run in one compiled program. Beside them a Python list keeps the
tokens of every row; each output must be what the parallel form gives for that list, or NaN exactly
where a token had no room or a ring has lost a token that the query sees.
"""

import random
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from toolkit.attention import (
    BlockCache,
    ForgettingCache,
    IndexedCache,
    KVCache,
    PathCache,
    deepseek_sparse_attention,
    deepseek_sparse_attention_step,
    forgetting_attention,
    forgetting_attention_step,
    mixture_of_block_attention,
    mixture_of_block_attention_step,
    native_sparse_attention,
    native_sparse_attention_step,
    path_attention,
    path_attention_step,
    softmax_attention,
    softmax_attention_step,
)
from toolkit.attention.latent import LatentCache, LatentConfig, LatentWeights, mla, mla_step

TOLERANCE = 2e-5
ROWS, CAPACITY, PIECE, KINDS = 3, 8, 4, 40  # KINDS: different tokens
STEP, EXTEND, PACKED, TRUNCATE, FREE, INSERT = range(6)
WINDOW = 5

LATENT = LatentConfig(width=8, heads=2, latent_size=4, key_size=4, rope_size=2, value_size=4)
WEIGHTS = LatentWeights.random(LATENT, jax.random.key(1))
NSA = {"block_size": 2, "selected_blocks": 3, "sliding_window": 3}
MOBA = {"block_size": 2, "selected_blocks": 2}
DSA = {"selected_tokens": 4}


class Case(NamedTuple):
    """Shapes of a token's arrays, an empty cache of some rows, and both forms of a mixer."""

    shapes: tuple[tuple[int, ...], ...]
    empty: object
    run: object
    step: object
    window: int | None = None


def _softmax(window=None, capacity=CAPACITY):
    return Case(
        ((2, 4), (1, 4), (1, 3)),
        lambda rows: KVCache.empty(rows, 1, 4, 3, capacity),
        lambda x, **how: softmax_attention(*x, sliding_window=window, **how),
        lambda x, cache: softmax_attention_step(*x, cache, sliding_window=window),
        window,
    )


CASES = {
    "softmax": _softmax(),
    "ring": _softmax(WINDOW, WINDOW + 2),
    "fox": Case(
        ((2, 4), (1, 4), (1, 3), (2,)),
        lambda rows: ForgettingCache.empty(rows, 2, 1, 4, 3, CAPACITY),
        lambda x, **how: forgetting_attention(*x[:3], -jnp.abs(x[3]), **how),
        lambda x, cache: forgetting_attention_step(*x[:3], -jnp.abs(x[3]), cache),
    ),
    "path": Case(
        ((2, 4), (1, 4), (1, 3), (1, 4), (1,)),
        lambda rows: PathCache.empty(rows, 1, 4, 3, CAPACITY),
        lambda x, **how: path_attention(*x[:4], jax.nn.sigmoid(x[4]), **how),
        lambda x, cache: path_attention_step(*x[:4], jax.nn.sigmoid(x[4]), cache),
    ),
    "latent": Case(
        ((8,),),
        lambda rows: LatentCache.empty(rows, 4, 2, CAPACITY),
        lambda x, **how: mla(*x, WEIGHTS, LATENT, **how),
        lambda x, cache: mla_step(*x, WEIGHTS, cache, LATENT),
    ),
    "nsa": Case(
        ((2, 4), (1, 4), (1, 3), (2,), (2,), (2,)),
        lambda rows: BlockCache.empty(rows, 1, 4, 3, CAPACITY, block_size=2),
        lambda x, **how: native_sparse_attention(*x, **NSA, **how),
        lambda x, cache: native_sparse_attention_step(*x, cache, **NSA),
    ),
    "moba": Case(
        ((2, 4), (1, 4), (1, 3)),
        lambda rows: BlockCache.empty(rows, 1, 4, 3, CAPACITY, block_size=2),
        lambda x, **how: mixture_of_block_attention(*x, **MOBA, **how),
        lambda x, cache: mixture_of_block_attention_step(*x, cache, **MOBA),
    ),
    "dsa": Case(
        ((2, 4), (1, 4), (1, 3), (2, 4), (4,), (2,)),
        lambda rows: IndexedCache.empty(rows, 1, 4, 3, 4, CAPACITY),
        lambda x, **how: deepseek_sparse_attention(*x, **DSA, **how),
        lambda x, cache: deepseek_sparse_attention_step(*x, cache, **DSA),
    ),
}


class Operation(NamedTuple):
    """One operation on all rows; what it does not need is there nevertheless."""

    code: int
    ids: np.ndarray  # tokens [rows, PIECE]
    cuts: np.ndarray  # where a row's next document begins; 0 for nowhere
    lengths: np.ndarray
    chosen: np.ndarray  # rows to free
    row: int  # to insert


class Row:
    """What a row of a cache must hold: a list of tokens, and those that cannot be seen any more."""

    def __init__(self, window, capacity):
        self.window, self.capacity = window, capacity
        self.tokens, self.written = [], 0

    def append(self, token):
        """The tokens that this one sees; None where one of them is lost."""
        self.tokens.append(token)
        self.written = max(self.written, len(self.tokens))
        if self.window is None:
            return list(self.tokens)
        first = max(0, len(self.tokens) - self.window)
        is_lost = first < max(0, self.written_before - self.capacity)
        return None if is_lost else self.tokens[first:]

    def piece(self, tokens, cut):
        """What each of several tokens sees, of which those from `cut` on are a new document."""
        seen = []
        had_room = self.window is not None or len(self.tokens) <= self.capacity
        self.written_before = self.written
        for t, token in enumerate(tokens):
            if cut and t == cut:
                self.tokens, self.written, self.written_before = [], 0, 0
                had_room = True
            found = self.append(token)
            seen.append(found if had_room else None)
        if self.window is None and len(self.tokens) > self.capacity:
            return [None] * len(seen)
        return seen

    def truncate(self, length):
        del self.tokens[length:]

    def clear(self):
        self.tokens, self.written = [], 0


def plan(case, capacity, count, seed=0):
    """Random operations, and for every token of them what it must see."""
    draw, rows = random.Random(seed), [Row(case.window, capacity) for _ in range(ROWS)]
    operations, wanted = [], []
    for _ in range(count):
        code = draw.choices(range(6), (6, 3, 2, 5, 1, 1))[0]
        ids = np.array([[draw.randrange(KINDS) for _ in range(PIECE)] for _ in rows])
        cuts = np.array([draw.randrange(PIECE) for _ in rows])
        # Half of the rows keep what they hold; a length beyond that changes nothing.
        lengths = [
            len(row.tokens) + 1
            if draw.random() < 0.4
            else max(len(row.tokens) - draw.randrange(5), 0)
            for row in rows
        ]
        chosen = np.array([draw.random() < 0.5 for _ in rows])
        operation = Operation(code, ids, cuts, np.array(lengths), chosen, draw.randrange(ROWS))
        operations.append(operation)
        seen = [[None] * PIECE for _ in rows]
        for number, row in enumerate(rows):
            if code in (STEP, EXTEND, PACKED):
                tokens = list(ids[number][: 1 if code == STEP else PIECE])
                found = row.piece(tokens, cuts[number] if code == PACKED else 0)
                seen[number][: len(found)] = found
            elif code == TRUNCATE:
                row.truncate(lengths[number])
            elif code == FREE and chosen[number]:
                row.clear()
            elif code == INSERT and number == operation.row:
                row.clear()
                row.piece(list(ids[number]), 0)
        wanted.append(seen)
    return operations, wanted


def tokens_of(case):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((KINDS, *shape)), jnp.float32) for shape in case.shapes]


def run(case, table, operations):
    """Outputs [operations, rows, PIECE, size] of one compiled program."""

    def one(cache, operation):
        code, ids, cuts, lengths, chosen, row = operation
        pieces = [x[ids] for x in table]

        def step(cache):
            out, cache = case.step([x[:, 0] for x in pieces], cache)
            return jnp.repeat(out[:, None], PIECE, axis=1), cache

        def extend(cache):
            return case.run(pieces, initial_state=cache)

        def packed(cache):
            segments = (jnp.arange(PIECE)[None] >= cuts[:, None]) & (cuts[:, None] > 0)
            segments = segments.astype(jnp.int32)
            return case.run(pieces, initial_state=cache, segment_ids=segments)

        nothing = jax.eval_shape(extend, cache)[0]

        def quiet(change):
            return lambda cache: (jnp.zeros(nothing.shape, nothing.dtype), change(cache))

        other = case.run([x[row][None] for x in pieces], initial_state=case.empty(1))[1]
        branches = (
            step,
            extend,
            packed,
            quiet(lambda cache: cache.truncate(lengths)),
            quiet(lambda cache: cache.free(chosen)),
            quiet(lambda cache: cache.insert(row[None], other)),
        )
        out, cache = jax.lax.switch(code, branches, cache)
        return cache, out

    fields = Operation(*(jnp.asarray(np.stack(x)) for x in zip(*operations, strict=True)))
    return jax.jit(lambda x: jax.lax.scan(one, case.empty(ROWS), x)[1])(fields)


def parallel(case, table, histories):
    """What the last token of every history gives, of the parallel form without a cache."""
    longest = CAPACITY + PIECE
    ids = np.zeros((len(histories), longest), int)
    for row, history in zip(ids, histories, strict=True):
        row[: len(history)] = history
    last = np.array([len(history) - 1 for history in histories])
    outs = jax.jit(lambda ids: case.run([x[ids] for x in table])[0])
    found = [outs(jnp.asarray(part)) for part in np.array_split(ids, max(1, len(ids) // 4096))]
    return np.concatenate(found)[np.arange(len(ids)), last]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("softmax", 1000),
        ("ring", 1000),
        pytest.param("ring", 10_000, marks=pytest.mark.slow),
        *(
            pytest.param(name, 10_000, marks=pytest.mark.nightly)
            for name in CASES
            if name != "ring"
        ),
    ],
)
def test_random_operations_equal_a_list(name, count):
    case, table = CASES[name], tokens_of(CASES[name])
    capacity = case.empty(1).capacity
    operations, wanted = plan(case, capacity, count)
    found = np.asarray(run(case, table, operations)).reshape(count, ROWS, PIECE, -1)
    right, compared, lost = [], [], 0
    for number, (operation, rows) in enumerate(zip(operations, wanted, strict=True)):
        if operation.code not in (STEP, EXTEND, PACKED):
            continue
        for row, seen in enumerate(rows):
            for t, history in enumerate(seen[: 1 if operation.code == STEP else PIECE]):
                out = found[number, row, t]
                if history is None:
                    assert np.isnan(out).all(), (number, operation, row, t)
                    lost += 1
                else:
                    right.append(history)
                    compared.append(out)
    assert lost > count / 20  # the plan meets full rows, or rings without their past
    assert len(right) > count
    distinct = sorted(set(map(tuple, right)))
    numbers = {history: number for number, history in enumerate(distinct)}
    outs = parallel(case, table, distinct)
    at = [numbers[tuple(history)] for history in right]
    np.testing.assert_allclose(
        np.stack(compared), outs.reshape(len(distinct), -1)[at], atol=TOLERANCE
    )
