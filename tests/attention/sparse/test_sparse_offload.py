"""PQCache with keys and values on the host: bytes by hand, what computing hides, cached blocks."""

import numpy as np
import pytest

from toolkit.attention.sparse import cached_share, hidden_iterations, offloaded_step


def test_bytes_are_those_of_the_published_layout():
    # 131,072 tokens, keys and values of 128 in two bytes, 2,048 selected, two codes of six bits.
    step = offloaded_step(131072, 2048, link=1e9)
    assert step.index_bytes == 131072 * 3 // 2 + 2**6 * 128 * 2
    assert step.fetched_bytes == 4 * 128 * 2048
    assert (step.index_bytes + step.fetched_bytes) / 1e6 == pytest.approx(1.26, abs=0.005)
    # Codes are a 171st part of the keys and a 341st of keys and values.
    codes = step.index_bytes - 2**6 * 128 * 2
    assert [round(131072 * size / codes) for size in (256, 512)] == [171, 341]
    heads = offloaded_step(131072, 2048, link=1e9, key_value_heads=8)
    assert heads[:2] == (8 * step.index_bytes, 8 * step.fetched_bytes)


def test_only_the_index_is_hidden_and_only_as_long_as_a_layer_computes():
    alone, part, whole = (
        offloaded_step(131072, 2048, link=1e9, compute=seconds) for seconds in (0, 1e-4, 1e-2)
    )
    index, fetched = alone.index_bytes / 1e9, alone.fetched_bytes / 1e9
    assert alone.seconds == pytest.approx(index + fetched)
    assert (alone.hidden, part.hidden) == (0, pytest.approx(1e-4 / (index + fetched)))
    assert part.seconds == pytest.approx(index + fetched)
    assert whole.seconds == pytest.approx(1e-2 + fetched)
    assert whole.hidden == pytest.approx(index / (index + fetched))


def test_a_cache_holds_the_blocks_used_most():
    selected = np.array([[0, 1, 9], [0, 8, 9], [4, 8, 9], [0, 1, 8]])
    # Held before each step: nothing; block 0; blocks 0 and 2 have three uses each, 0 is the first.
    np.testing.assert_allclose(
        cached_share(selected, 12, block=4, blocks=1), [0, 1 / 3, 0, 1 / 3], atol=1e-9
    )
    assert cached_share(selected, 12, block=4, blocks=3)[1:].tolist() == pytest.approx(
        [1, 2 / 3, 1]
    )
    again = np.tile(np.arange(64), (3, 1))
    assert cached_share(again, 4096).tolist() == [0, 1, 1]


def test_k_means_runs_as_long_as_the_prompt_is_read():
    assert [hidden_iterations(prefill=t, first=0.5, iteration=0.1) for t in (0.0, 2.0, 1e6)] == [
        3,
        18,
        300,
    ]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: offloaded_step(10, 11, link=1.0), "fetched must be at most length"),
        (lambda: offloaded_step(10, 1, link=0.0), "link must be above 0"),
        (lambda: offloaded_step(10, 1, link=1.0, bits=17), "bits must be one of"),
        (lambda: offloaded_step(10, 1, link=1.0, compute=-1.0), "compute must be at least 0"),
        (lambda: cached_share(np.array([[12]]), 12), "tokens from 0 to 11"),
        (lambda: cached_share(np.zeros((0, 4), int), 12), "got shape"),
        (lambda: hidden_iterations(1.0, 1.0, 0.0), "iteration must be above 0"),
    ],
)
def test_wrong_calls_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
