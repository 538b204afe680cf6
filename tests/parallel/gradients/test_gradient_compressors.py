"""Every row of the table of compressors keeps what it states; a new row is tested without a line.

The bounds are searched for their worst case, and hold with a control that breaks them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from toolkit.parallel.gradients import COMPRESSORS, contracted
from toolkit.parallel.gradients.compression.compressors import compressor_of
from toolkit.parallel.gradients.compression.packing import pack, unpack

ROUNDING = 1e-5  # for a number so near a level that no draw rounds it away
STANDARD_ERRORS = 5.0
DRAWS = 4000
SIZE = 256
ROWS = {name: make() for name, make in COMPRESSORS.items()}
SMALL = {"int4 nearest": COMPRESSORS["int4"](32, "nearest"), "int8 of 32": COMPRESSORS["int8"](32)}
UNBIASED = {
    "int8": COMPRESSORS["int8"](64), "int4": COMPRESSORS["int4"](64),
    "ternary": COMPRESSORS["ternary"](), "qsgd": COMPRESSORS["qsgd"](4),
    "random_k": COMPRESSORS["random_k"](0.1, True),
}  # fmt: skip


def vector(n=SIZE, seed=0):
    return jax.random.normal(jax.random.key(seed), (n,))


def through(row, x, key=100):  # not the seed of x, whose draws it would follow
    key = jax.random.key(key)
    return row.decode(row.encode(x, key), x.shape[0], key)


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("n", [1, 7, 16])
def test_what_is_packed_is_unpacked(bits, n):
    codes = np.random.default_rng(n).integers(0, 2**bits, (3, n)).astype(np.uint8)
    packed = pack(jnp.asarray(codes), bits)
    assert packed.shape == (3, -(-n * bits // 8))
    np.testing.assert_array_equal(unpack(packed, bits, n), codes)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("n", [1, 37, 512])
def test_payloads_have_the_stated_bytes(name, n):
    row = ROWS[name]
    payload = jax.eval_shape(lambda x: row.encode(x, jax.random.key(0)), jnp.ones(n))
    assert sum(x.size * x.dtype.itemsize for x in payload) == row.payload_bytes(n)
    # What only moves is no type that XLA for CPUs widens.
    assert all(
        x.dtype in (jnp.uint8, jnp.uint16, jnp.int8, jnp.int32, jnp.float32) for x in payload
    )


@pytest.mark.parametrize("name", ROWS)
def test_a_zero_gradient_stays_zero(name):
    np.testing.assert_array_equal(through(ROWS[name], jnp.zeros(300)), 0.0)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("name", ROWS)
def test_what_is_not_finite_stays_visible(name, bad):
    row = ROWS[name]
    places = jnp.array([0, 7, 123, 254, 255, 299])  # a maximum may take a NaN for a number at some
    found = jax.vmap(lambda at: through(row, vector(300).at[at].set(bad)))(places)
    assert not jnp.isfinite(found).all(axis=1).any()


@pytest.mark.parametrize("name", ["int8", "int4", "ternary", "qsgd"])
def test_a_quantiser_keeps_nan_in_its_block(name):
    found = through(ROWS[name], vector(600).at[300].set(jnp.nan))
    assert jnp.isnan(found[256:512]).all()
    assert jnp.isfinite(found[:256]).all()
    assert jnp.isfinite(found[512:]).all()


@pytest.mark.slow
def test_one_outlier_ruins_its_block():
    for row, wanted in ((COMPRESSORS["int8"](64), 0.33), (COMPRESSORS["int4"](64), 2.9)):
        x = vector(4096)
        x = x.at[::64].set(100 * jnp.abs(x[::64]))
        others = jnp.arange(4096) % 64 != 0
        error = jnp.linalg.norm((through(row, x) - x) * others) / jnp.linalg.norm(x * others)
        assert error == pytest.approx(wanted, rel=0.25)


@pytest.mark.parametrize("name", UNBIASED)
def test_unbiased_rows_are_unbiased_within_their_variance(name):
    row, x = UNBIASED[name], vector()
    draws = jax.jit(jax.vmap(lambda key: row.decode(row.encode(x, key), SIZE, key)))
    found = np.asarray(draws(jax.random.split(jax.random.key(1), DRAWS)), np.float64)
    exact = np.asarray(x, np.float64)
    spread = found.std(axis=0) / np.sqrt(DRAWS)
    is_random = spread > 1e-9
    assert np.all(np.abs(found.mean(axis=0) - exact)[~is_random] < ROUNDING * np.abs(exact).max())
    z = (found.mean(axis=0) - exact)[is_random] / spread[is_random]
    assert np.abs(z).max() < STANDARD_ERRORS, (z, spread)
    variance = ((found - exact) ** 2).sum(axis=1).mean() / (exact**2).sum()
    assert variance <= row.variance(SIZE)


def test_rounding_to_nearest_is_biased():
    """The control of the test above."""
    row, x = COMPRESSORS["int4"](64, "nearest"), vector()
    assert row.variance is None
    assert jnp.abs(through(row, x) - x).max() > 100 * ROUNDING


CONTRACTIONS = {name: row for name, row in (ROWS | SMALL).items() if row.contraction is not None}


@pytest.mark.parametrize("name", CONTRACTIONS)
def test_contractions_contract_in_the_worst_case_found(name):
    row = CONTRACTIONS[name]

    @jax.jit
    def lost(x):
        keys = jax.random.split(jax.random.key(3), 64)
        found = jax.vmap(lambda key: row.decode(row.encode(x, key), 64, key))(keys)
        return jnp.mean(jnp.sum((found - x) ** 2, axis=1)) / jnp.sum(x**2)

    flat = [
        jnp.where(jnp.arange(64) % 32, level, 1.0) for level in (0, 0.49 / 7, 0.49 / 127, 0.2, 1)
    ]
    drawn = [vector(64, seed) ** power for seed in range(3) for power in (1, 3)]
    worst = max(float(lost(x)) for x in flat + drawn)
    slack = 0.35 * row.contraction(64) if name == "random_k" else 1e-4  # 64 draws of places
    assert worst <= 1 - row.contraction(64) + slack
    if name == "int4 nearest":  # and the bound is met, so that it is no looser than it must be
        assert worst > 0.9 * (1 - row.contraction(64))


@pytest.mark.slow
def test_ternary_is_no_contraction_until_it_is_divided():
    ternary = COMPRESSORS["ternary"]()
    assert ternary.contraction is None
    row, x = contracted(ternary), jnp.full(SIZE, 0.06).at[0].set(1.0)
    keys = jax.random.split(jax.random.key(0), 200)

    def lost(row):
        found = jax.vmap(lambda key: row.decode(row.encode(x, key), SIZE, key))(keys)
        return jnp.mean(jnp.sum((found - x) ** 2, axis=1)) / jnp.sum(x**2)

    assert lost(ternary) > 1 > lost(row)
    with pytest.raises(ValueError, match="wanted one with a variance"):
        contracted(COMPRESSORS["top_k"]())


def test_top_k_takes_the_first_of_equals_and_sends_values_as_they_are():
    x = jnp.array([1.0, -3.0, 3.0, 3.0, 0.5])
    np.testing.assert_array_equal(through(COMPRESSORS["top_k"](0.4), x), [0, -3, 3, 0, 0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: COMPRESSORS["int4"](31), "block: got 31, wanted a multiple of 2"),
        (lambda: COMPRESSORS["ternary"](6), "block: got 6, wanted a multiple of 4"),
        (lambda: COMPRESSORS["int8"](1), "block: got 1, wanted at least 2"),
        (lambda: COMPRESSORS["int8"](64, "up"), "rounding must be one of 'stochastic', 'nearest'"),
        (lambda: COMPRESSORS["qsgd"](128), "levels: got 128, wanted 1 to 127"),
        (lambda: compressor_of("top_k=1.5"), "share: got 1.5, wanted more than 0 and at most 1"),
        (lambda: compressor_of("int3"), "compressor must be one of 'float32', "),
        (lambda: compressor_of("int4=x"), "compressor: got 'int4=x'"),
    ],
)
def test_what_no_compressor_takes_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
