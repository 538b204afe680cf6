"""Task definitions against plain Python and closed forms."""

import collections
import itertools

import jax
import numpy as np
import pytest

from toolkit.experiments.tasks import (
    GROUPS,
    MultiQueryRecall,
    Needle,
    StateBasedRecall,
    WordProblem,
)
from toolkit.experiments.tasks.groups import group
from toolkit.experiments.tasks.pointers import ADDRESS, BIT, INIT, OPS, POINTER, QUERY

ORDERS = dict(zip(GROUPS, (2, 60, 6, 60, 60, 120), strict=True))
SEQUENCES = 64


def draw(task, seed=0):
    batch = jax.jit(task.draw, static_argnums=1)(jax.random.key(seed), SEQUENCES)
    tokens, targets, mask = (np.asarray(array) for array in batch)
    assert tokens.shape == targets.shape == mask.shape == (SEQUENCES, task.length)
    assert tokens.dtype == targets.dtype == np.int32
    assert tokens.min() >= 0
    assert max(tokens.max(), targets.max()) < task.vocabulary
    return tokens, targets, mask


@pytest.mark.parametrize("name", GROUPS)
def test_tables_are_groups(name):
    table = group(name).table
    everything = np.arange(ORDERS[name])
    assert table.shape == (ORDERS[name],) * 2
    assert (np.sort(table, axis=0) == everything[:, None]).all(), "columns are permutations"
    assert (np.sort(table, axis=1) == everything).all(), "rows are permutations"
    assert (table[0] == everything).all()
    assert (table[:, 0] == everything).all()
    left, right = table[table], table[:, table]  # [a, b, c] -> (a b) c and a (b c)
    assert (left == right).all()
    is_abelian = (table == table.T).all()
    assert is_abelian == name.startswith("Z")


def test_only_a5_and_s5_are_not_solvable():
    def derived_sizes(table):
        inverse = (table == 0).argmax(1)
        members = np.arange(len(table))
        sizes = [len(members)]
        while True:
            a, b = np.meshgrid(members, members)
            commutators = np.unique(table[table[inverse[a], inverse[b]], table[a, b]])
            closed = commutators
            while len(more := np.unique(table[np.ix_(closed, closed)])) > len(closed):
                closed = more
            if len(closed) == sizes[-1]:
                return sizes
            members = closed
            sizes.append(len(closed))

    unsolvable = {name for name in GROUPS if derived_sizes(group(name).table)[-1] > 1}
    assert unsolvable == {"A5", "S5"}


@pytest.mark.parametrize("task", [WordProblem("Z2", 9), WordProblem("S5", 12)])
def test_words_accumulate_from_the_left(task):
    tokens, targets, mask = draw(task)
    table = group(task.group).table
    assert mask.all()
    for word, answers in zip(tokens, targets, strict=True):
        state = 0
        for element, answer in zip(word, answers, strict=True):
            state = table[state, element]
            assert state == answer
    if task.group == "Z2":
        assert (targets == np.cumsum(tokens, 1) % 2).all()


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_recall_is_made_easier_by_fewer_swaps_and_hints(share):
    task = StateBasedRecall(8)
    batch = jax.jit(task.draw_easier, static_argnums=1)(jax.random.key(0), 16, share)
    for sequence, answers, scored in zip(*map(np.asarray, batch), strict=True):
        bits, swaps = sequence[:8], sequence[20:36].reshape(8, 2)
        held = dict(zip(sequence[9:19:2], sequence[10:19:2] - ADDRESS, strict=True))
        expected = {10 + 2 * i: bits[address] for i, address in enumerate(held.values())}
        assert (swaps[:2] >= POINTER).all()
        assert (swaps[2:] > 0).all() == (share == 1)
        for i, (p, q) in enumerate(swaps[swaps.min(1) > 0]):
            expected[20 + 2 * i] = bits[held[p]]
            held[p], held[q] = held[q], held[p]
            expected[21 + 2 * i] = ADDRESS + held[q]
        expected[37] = bits[held[sequence[-1]]]
        assert dict(zip(np.flatnonzero(scored), answers[scored], strict=True)) == expected
        assert not answers[~scored].any()


def test_swaps_only_reads_transpositions():
    for name, points in (("S3", 3), ("S5", 5)):
        swaps = group(name).swaps
        assert len(swaps) == points * (points - 1) // 2
        assert all(group(name).table[s, s] == 0 for s in swaps)
        tokens, _, _ = draw(WordProblem(name, 8, is_swaps_only=True))
        assert set(tokens.ravel()) == set(swaps)
    with pytest.raises(ValueError, match="A5 has no swaps"):
        WordProblem("A5", 8, is_swaps_only=True)


def test_queries_of_mqar_are_answered_by_looking_them_up():
    task = MultiQueryRecall(pairs=8, length=64, vocabulary=64)
    tokens, targets, mask = draw(task)
    gaps = collections.Counter()
    for sequence, answers, scored in zip(tokens, targets, mask, strict=True):
        keys, values = sequence[:16:2], sequence[1:16:2]
        assert len(set(keys)) == len(set(values)) == 8
        assert keys.min() >= 1
        assert keys.max() < 32 <= values.min()
        memory = dict(zip(keys, values, strict=True))
        asked = np.flatnonzero(scored)
        assert sorted(sequence[asked]) == sorted(keys), "every key once more"
        assert (asked >= 16).all()
        assert (asked % 2 == 0).all()
        assert [memory[sequence[i]] for i in asked] == list(answers[asked])
        assert not answers[~scored].any()
        gaps.update((asked - 16) // 2)
    assert gaps[0] > gaps[23] > 0, "near slots are likelier than far ones"


def test_slots_of_mqar_follow_the_power_law():
    task = MultiQueryRecall(pairs=1, length=10, vocabulary=4)  # one query, four slots
    batch = jax.jit(task.draw, static_argnums=1)(jax.random.key(1), 20_000)
    found = np.asarray(batch.mask)[:, 2::2].mean(0)
    weights = np.arange(1, 5) ** (0.01 - 1)
    np.testing.assert_allclose(found, weights / weights.sum(), atol=0.015)


def test_state_based_recall_is_what_a_simulation_answers():
    task = StateBasedRecall(cells=8, most_cells=16)
    assert (task.length, task.vocabulary) == (38, 27)
    lengths = [StateBasedRecall(n).length for n in (8, 16, 32, 64, 128, 256)]
    assert lengths == [38, 62, 110, 206, 398, 782]
    batch, moved = jax.jit(task.draw_with_moves, static_argnums=1)(jax.random.key(0), SEQUENCES)
    tokens, targets, mask = draw(task)
    assert (tokens == np.asarray(batch.tokens)).all()
    shares = []
    for sequence, answers, scored, has_moved in zip(tokens, targets, mask, moved, strict=True):
        bits, rest = sequence[:8] - BIT, list(sequence[8:])
        assert set(bits) <= {0, 1}
        assert rest.pop(0) == INIT
        start = {rest.pop(0): rest.pop(0) - ADDRESS for _ in range(5)}
        assert set(start) == set(range(POINTER, POINTER + 5))
        assert len(set(start.values())) == 5
        assert rest.pop(0) == OPS
        held = dict(start)
        for _ in range(8):
            p, q = rest.pop(0), rest.pop(0)
            assert p != q
            held[p], held[q] = held[q], held[p]
        assert rest.pop(0) == QUERY
        [queried] = rest
        assert list(np.flatnonzero(scored)) == [37]
        assert answers[37] == BIT + bits[held[queried]]
        assert has_moved == (held[queried] != start[queried])
        shares.append(has_moved)
    assert 0.6 < np.mean(shares) < 1


def test_the_needle_lies_at_its_distance():
    task = Needle(distance=6, values=4)
    tokens, targets, mask = draw(task)
    distances = set()
    for sequence, answers, scored in zip(tokens, targets, mask, strict=True):
        assert list(np.flatnonzero(scored)) == [6]
        assert sequence[6] == 8
        [needle] = np.flatnonzero(sequence < 4)
        assert sequence[needle] == answers[6]
        distances.add(6 - needle)
    assert distances == set(range(1, 7))
    at = np.asarray(task.draw_at(jax.random.key(0), np.array([2, 5])).tokens)
    assert list((at < 4).argmax(1)) == [4, 1]


def test_sizes_out_of_range_are_refused():
    wrong = [
        lambda: Needle(0),
        lambda: MultiQueryRecall(pairs=8, length=30),
        lambda: MultiQueryRecall(pairs=8, vocabulary=16),
        lambda: StateBasedRecall(4),
        lambda: StateBasedRecall(8, most_cells=4),
        lambda: WordProblem("S3", 0),
        lambda: WordProblem("M11", 4).vocabulary,
    ]
    for make in wrong:
        with pytest.raises(ValueError, match="wanted"):
            make()


def test_draws_depend_on_the_key_alone():
    for task in (Needle(5), StateBasedRecall(8), MultiQueryRecall(2), WordProblem("S3", 4)):
        first, again, other = (draw(task, seed)[0] for seed in (3, 3, 4))
        assert (first == again).all()
        assert (first != other).any()
        assert len(set(itertools.chain.from_iterable(first.tolist()))) > 2
