"""Keys and values in a few bits: published codes, the specification's errors, and a selection."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sparse_laws

from toolkit.attention import sparse
from toolkit.attention.quantised import (
    KiviCache,
    block_floats,
    from_block_floats,
    rearranged_channels,
)
from toolkit.attention.quantised.kivi import decode, encode

EXACT = 1e-5
# Errors of all channels and of the ordinary ones: as they lie, rearranged, by rotary pairs.
OF_BLOCKS = {
    (4, 16): ((0.122, 0.542), (0.120, 0.277), None),
    (4, 32): ((0.155, 0.760), (0.135, 0.452), (0.144, 0.600)),
    (6, 32): ((0.064, 0.349), (0.052, 0.253), None),
    (8, 32): ((0.0166, 0.091), (0.0137, 0.068), None),
}
# Of `quant_and_pack_kcache` and `quant_and_pack_vcache` in KIVI's release, groups of 16 of the
# arrays below: root mean square errors and sums of all codes of keys and values.
OF_KIVI = {2: (0.3357202, 0.3274395, 6281, 6037), 4: (0.0666669, 0.0649665, 31462, 30211)}


def relative(found, exact):
    return np.sqrt(np.square(found - exact).sum() / np.square(exact).sum())


def rounded(x, **how):
    found = from_block_floats(*block_floats(jnp.asarray(x, jnp.float32), **how), bits=how["bits"])
    return np.asarray(found)


@pytest.mark.parametrize(("bits", "block"), OF_BLOCKS)
def test_blocks_have_the_errors_of_the_specification(bits, block):
    random = np.random.default_rng(0)
    outliers, sizes = random.choice(128, 8, replace=False), random.uniform(8, 32, 8)
    data, texts = (random.standard_normal((512, 128)) for _ in range(2))
    for x in (data, texts):
        x[:, outliers] *= sizes
    ordinary = np.setdiff1d(np.arange(128), outliers)
    largest = jnp.asarray(np.abs(texts).max(axis=0), jnp.float32)
    orders = (np.arange(128), *(rearranged_channels(largest, keeps_pairs=p) for p in (False, True)))
    for order, wanted in zip(orders, OF_BLOCKS[bits, block], strict=True):
        if wanted is None:
            continue
        back = np.empty_like(data)
        back[:, np.asarray(order)] = rounded(data[:, np.asarray(order)], bits=bits, block=block)
        found = relative(back, data), relative(back[:, ordinary], data[:, ordinary])
        np.testing.assert_allclose(found, wanted, atol=6e-4)


def test_a_number_is_within_half_a_step_or_one_where_it_is_clipped():
    x = np.random.default_rng(1).standard_normal((64, 32)).astype(np.float32)
    errors = []
    for bits in range(2, 9):
        numbers, exponents = block_floats(jnp.asarray(x), bits=bits, block=16)
        step = np.repeat(2.0 ** (np.asarray(exponents, int) - bits + 2), 16, axis=1)
        found = np.asarray(from_block_floats(numbers, exponents, bits=bits))
        is_clipped = np.abs(numbers) == 2 ** (bits - 1) - 1
        assert (np.abs(found - x) <= np.where(is_clipped, 1, 0.5) * step).all()
        errors.append(relative(found, x))
    assert (np.diff(errors) < 0).all()  # more bits are never worse
    powers = 2.0 ** np.arange(-8, 8)
    np.testing.assert_array_equal(rounded(powers, bits=2, block=1), powers)


def test_blocks_of_zeros_and_of_nan():
    x = jnp.array([0.0, 0.0, 1.0, jnp.nan, jnp.inf, 2.0, 1e-45, 0.0])
    found = from_block_floats(*block_floats(x, block=2), bits=4)
    assert jnp.isnan(found).tolist() == [False, False, True, True, True, True, False, False]
    assert found[:2].tolist() == [0, 0]


def test_the_sorted_order_is_the_best_of_all_and_keeps_scores_and_pairs():
    size = np.random.default_rng(2).uniform(1, 9, 6).astype(np.float32)

    def cost(order):
        return (2 * np.square(size[list(order)].reshape(-1, 2).max(axis=1))).sum()

    best = min(cost(order) for order in itertools.permutations(range(6)))
    order = rearranged_channels(jnp.asarray(size))
    assert cost(np.asarray(order)) == best
    q, k = (np.random.default_rng(s).integers(-9, 9, (5, 6)) for s in (3, 4))
    np.testing.assert_array_equal(q[:, order] @ k[:, order].T, q @ k.T)
    pairs = np.asarray(rearranged_channels(jnp.asarray(size), keeps_pairs=True))
    np.testing.assert_array_equal(pairs[3:], pairs[:3] + 3)


def arrays():
    random = np.random.default_rng(35)
    keys, values = (random.standard_normal((1, 2, 64, 32)).astype(np.float32) for _ in range(2))
    keys[..., 5] *= 10
    return jnp.asarray(keys), jnp.asarray(values)


@pytest.mark.parametrize("bits", OF_KIVI)
def test_codes_are_those_of_the_release(bits):
    keys, values = arrays()
    cache = KiviCache.of(keys, values, jnp.array([64]), bits=bits, group=16, recent=16)
    found = [decode(x, bits, 16) for x in (cache.keys, cache.values)]
    found[0] = found[0].swapaxes(2, 3)
    errors = [relative(np.asarray(x), np.asarray(y)) for x, y in zip(found, (keys, values))]  # noqa: B905
    np.testing.assert_allclose(errors, OF_KIVI[bits][:2], rtol=1e-5)
    mask, sums = 2**bits - 1, []
    for codes in (cache.keys, cache.values):
        packed = np.asarray(codes.packed, int)
        sums.append(sum(((packed >> shift) & mask).sum() for shift in range(0, 8, bits)))
    assert sums == list(OF_KIVI[bits][2:])
    # The control: keys in groups of a token's channels, which the outlier spoils.
    per_token = decode(encode(keys, bits, 16), bits, 16)
    ordinary = np.arange(32) != 5
    by_token, by_channel = (
        relative(np.asarray(x)[..., ordinary], np.asarray(keys)[..., ordinary])
        for x in (per_token, found[0])
    )
    assert by_token > 1.5 * by_channel


@pytest.mark.parametrize("length", [0, 1, 33])
def test_a_cache_grown_is_one_built_and_its_newest_tokens_are_exact(length):
    keys, values = (jnp.concatenate([x, x[:, :, ::-1]]) for x in arrays())  # rows of two lengths
    lengths = jnp.array([length, 20])
    how = {"bits": 4, "group": 16, "recent": 16}
    cache = KiviCache.of(keys, values, lengths, **how)
    append = jax.jit(lambda cache, k, v: cache.append(k, v))
    for _ in range(29):
        here = jnp.arange(2), slice(None), cache.length
        cache = append(cache, keys[here], values[here])
    built = KiviCache.of(keys, values, lengths + 29, **how)
    for grown, fresh in zip(cache.floats(), built.floats(), strict=True):
        np.testing.assert_array_equal(grown, fresh)
    token = np.arange(64)
    for row, tokens in enumerate((lengths + 29).tolist()):
        found = [np.asarray(x[row]) for x in cache.floats()]
        exact = (
            (token >= tokens - tokens % 16) & (token < tokens),
            (token >= tokens - 16) & (token < tokens),
        )
        for x, whole, is_exact in zip(found, (keys, values), exact, strict=True):
            np.testing.assert_array_equal(x[:, is_exact], np.asarray(whole[row])[:, is_exact])
            assert (x[:, tokens:] == 0).all()
            assert relative(x[:, :tokens], np.asarray(whole[row])[:, :tokens]) < 0.1


def test_bits_are_counted_and_wrong_settings_refused():
    keys, values = arrays()
    of = lambda **how: KiviCache.of(keys, values, jnp.array([64]), **how)  # noqa: E731
    cache = of(bits=2, group=16, recent=16)
    codes = [x for part in (cache.keys, cache.values) for x in part]
    assert cache.bits_per_number() == 8 * sum(x.nbytes for x in codes) / (keys.size + values.size)
    for how, what in (
        ({"bits": 3}, "bits must be one of"),
        ({"group": 12, "recent": 16}, "recent must be a multiple of group"),
        ({"group": 16, "recent": 48}, "the capacity must be a multiple of recent"),
    ):
        with pytest.raises(ValueError, match=what):
            of(**how)
    with pytest.raises(ValueError, match="block must divide the size 32"):
        block_floats(keys, block=5)


@pytest.mark.slow
def test_few_bits_and_a_selection_add_their_errors():
    """Four bits cost little beside what a selection drops; two bits cost more, and are seen."""
    law = sparse_laws.topics(3, 4, key_heads=2, tokens=512, queries=6, size=32, sharpness=2.0)
    keys, values = (jnp.asarray(x)[None] for x in law[1:])
    own, length = sparse.SELECTORS["quest"](), jnp.array([512])

    def out(keys, values, tokens):
        cache = sparse.build(own, keys, values, length)
        budget = sparse.FixedTokens(tokens)
        steps = [sparse.decode_step(cache, jnp.asarray(q)[None], own, budget).out for q in law.q]
        return np.asarray(jnp.stack(steps))

    exact, dropped = out(keys, values, 512), out(keys, values, 128)
    four, two = (KiviCache.of(keys, values, length, bits=bits).floats() for bits in (4, 2))
    apart = relative(dropped, exact) + relative(out(*four, 512), exact)
    assert relative(out(*four, 128), exact) < apart
    assert relative(out(*two, 128), exact) > relative(out(*four, 128), exact)
    floats = [from_block_floats(*block_floats(x, bits=8), bits=8) for x in (keys, values)]
    np.testing.assert_allclose(
        relative(out(*floats, 128), exact), relative(dropped, exact), rtol=0.05
    )
