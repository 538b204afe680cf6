"""What theory says of looped mixers, checked without training.

Rank of a token's transition, permutations by reflections, reach of windows, bounds on the state.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64 import enable_x64
from looped_small_model import small, some_tokens

from toolkit.attention import (
    delta_net,
    gated_delta_net_step,
    gated_delta_product,
    kimi_delta_attention,
    retention,
    softmax_attention,
)
from toolkit.looped import LoopedConfig
from toolkit.looped.theory import (
    effective_transition,
    influence_bound,
    permutation_steps,
    tokens_reached,
)

EXACT = 1e-12  # float64
FLOAT32_ROUNDING = 1e-6


@pytest.fixture
def float64():
    with enable_x64(True):
        yield


def unit_keys(steps, size, seed=0):
    keys = np.random.default_rng(seed).normal(size=(steps, size))
    return keys / np.linalg.norm(keys, axis=-1, keepdims=True)


def rank(matrix):
    return int(np.linalg.matrix_rank(matrix, tol=1e-9))


# Rank of the transition: loops and keys.


@pytest.mark.parametrize("steps", [1, 2, 4, 8, 10])
def test_rank_grows_with_steps_until_the_key_size(float64, steps):
    keys, beta = unit_keys(steps, 8), np.linspace(0.3, 2.0, steps)
    transition = effective_transition(jnp.asarray(keys), jnp.asarray(beta))
    assert rank(transition - np.eye(8)) == min(steps, 8)


def test_one_key_in_every_loop_is_one_step(float64):
    keys, beta = np.repeat(unit_keys(1, 8), 5, axis=0), np.full(5, 0.7)
    transition = effective_transition(jnp.asarray(keys), jnp.asarray(beta))
    assert rank(transition - np.eye(8)) == 1
    # ... of strength 1 - prod (1 - beta).
    once = effective_transition(jnp.asarray(keys[:1]), jnp.asarray([1 - 0.3**5]))
    np.testing.assert_allclose(transition, once, atol=EXACT)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_decays_leave_the_rank_of_the_change(float64, steps):
    keys, beta = unit_keys(steps, 8), np.linspace(0.5, 1.9, steps)
    log_decay = -np.random.default_rng(1).uniform(0, 1, (steps, 8))
    transition = effective_transition(*map(jnp.asarray, (keys, beta, log_decay)))
    decays = np.diag(np.exp(log_decay.sum(0)))
    assert rank(transition - decays) == steps
    assert rank(transition - np.eye(8)) == 8


def test_the_transition_is_what_the_mixers_do(float64):
    """Tokens without values multiply a state by their transitions and do nothing else."""
    steps, size = 5, 4
    keys, beta = unit_keys(steps, size), np.linspace(0.2, 2.0, steps)
    log_decay = -np.random.default_rng(1).uniform(0, 1, (steps, size))
    token = lambda x: jnp.asarray(x)[None, :, None]  # noqa: E731
    k, b, g = token(keys), token(beta), token(log_decay)
    state = jnp.asarray(np.random.default_rng(2).normal(size=(1, 1, size, size)))
    nothing = jnp.zeros((1, steps, 1, size))
    wanted = effective_transition(*map(jnp.asarray, (keys, beta, log_decay))) @ state[0, 0]
    _, ours = kimi_delta_attention(k, k, nothing, g, b, initial_state=state, implementation="scan")
    np.testing.assert_allclose(ours[0, 0], wanted, atol=EXACT)
    # The same corrections within one token: only the decay is taken once.
    wanted = effective_transition(jnp.asarray(keys), jnp.asarray(beta)) @ state[0, 0]
    _, ours = gated_delta_product(
        k[:, :1],
        jnp.asarray(keys)[None, None, None],
        jnp.zeros((1, 1, 1, steps, size)),
        jnp.full((1, 1, 1), -0.5),
        jnp.asarray(beta)[None, None, None],
        initial_state=state,
        implementation="scan",
    )
    np.testing.assert_allclose(ours[0, 0], np.exp(-0.5) * wanted, atol=EXACT)


# Negative eigenvalues: transpositions and tracking of permutations.


def test_a_transposition_is_a_reflection_and_needs_strength_two(float64):
    key = jnp.asarray([[1.0, 0.0, -1.0, 0.0]]) / jnp.sqrt(2.0)
    exchange = np.eye(4)[[2, 1, 0, 3]]
    np.testing.assert_allclose(effective_transition(key, jnp.asarray([2.0])), exchange, atol=EXACT)
    for beta in np.linspace(0.05, 1.0, 8):
        for steps in (1, 2, 4, 8):
            keys, strengths = jnp.asarray(unit_keys(steps, 4)), jnp.full(steps, beta)
            transition = effective_transition(keys, strengths)
            # An exchange has determinant -1; below strength one no number of steps gets there.
            assert np.linalg.det(transition) == pytest.approx((1 - beta) ** steps, abs=EXACT)
            assert np.linalg.norm(transition, 2) <= 1 + EXACT
            if steps == 1:
                assert np.linalg.eigvalsh(transition).min() >= -EXACT


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_every_permutation_needs_as_many_steps_as_its_rank(float64, size):
    needed = []
    for permutation in itertools.permutations(range(size)):
        keys, beta = permutation_steps(permutation)
        assert keys.shape == (size - 1, size)
        matrix = np.eye(size)[:, list(permutation)]  # column i is e_permutation[i]
        product = np.eye(size)
        for key, strength in zip(keys, beta, strict=True):
            product -= strength * np.outer(key, key @ product)
        np.testing.assert_allclose(product, matrix, atol=EXACT)
        needed.append(int(np.sum(beta > 0)))
        # No sequence of fewer corrections can do it: each adds one to the rank at most.
        assert needed[-1] == rank(matrix - np.eye(size))
    assert max(needed) == size - 1  # 4 for S_5; more than 1 from S_3 on


def test_a_delta_product_cell_tracks_permutations(float64):
    """Prefix products of 300 random elements of S_5: 4 corrections a token, nothing trained."""
    size = 5
    words = np.array([np.random.default_rng(i).permutation(size) for i in range(300)])
    steps = [permutation_steps(word) for word in words]
    keys, beta = (jnp.asarray(np.stack(part))[None, :, None] for part in zip(*steps, strict=True))
    items = jnp.arange(size, dtype=jnp.float64)
    held = np.arange(size)
    for word in words:
        held = held[np.argsort(word)]
    _, state = gated_delta_product(
        jnp.zeros((1, 300, 1, size)),
        keys,
        jnp.zeros((1, 300, 1, size - 1, 1)),
        jnp.zeros((1, 300, 1)),
        beta,
        initial_state=items[None, None, :, None],
        implementation="scan",
    )
    np.testing.assert_allclose(state[0, 0, :, 0], held, atol=EXACT)


def test_one_step_a_token_tracks_swaps(float64):
    """Five rows, 1000 exchanges: rank one a token is enough, with strength two."""
    rng = np.random.default_rng(0)
    pairs = [rng.choice(5, 2, replace=False) for _ in range(1000)]
    keys = np.stack([np.eye(5)[i] - np.eye(5)[j] for i, j in pairs]) / np.sqrt(2)
    held = np.arange(5)
    for i, j in pairs:
        held[[i, j]] = held[[j, i]]
    k = jnp.asarray(keys)[None, :, None]

    def final(beta):
        _, state = delta_net(
            k,
            k,
            jnp.zeros((1, 1000, 1, 5)),
            jnp.full((1, 1000, 1), beta),
            initial_state=jnp.eye(5)[None, None],
            implementation="scan",
        )
        return state[0, 0]

    np.testing.assert_allclose(final(2.0), np.eye(5)[held], atol=EXACT)
    # Strength one averages the two rows instead, and soon all five are alike.
    np.testing.assert_allclose(final(1.0), 0.2, atol=EXACT)


def test_permutations_are_checked():
    with pytest.raises(ValueError, match=r"permutation is \[0, 2\]"):
        permutation_steps([0, 2])
    with pytest.raises(ValueError, match="beta"):
        effective_transition(jnp.ones((2, 3)), jnp.ones(3))
    with pytest.raises(ValueError, match="log_decay"):
        effective_transition(jnp.ones((2, 3)), jnp.ones(2), jnp.ones(2))


# Reach of windows.


def windows(h, window, times):
    """Windowed attention of a sequence to itself, over and over."""

    def layer(h, _):
        heads = h[None, :, None]
        out, _ = softmax_attention(heads, heads, heads, sliding_window=window)
        return out[0, :, 0], None

    return jax.lax.scan(layer, h, length=times)[0]


@pytest.mark.parametrize(
    ("layers", "loops", "tokens"), [(1, 1, 5), (1, 2, 9), (1, 4, 17), (2, 2, 17)]
)
def test_loops_of_a_window_reach_that_many_tokens_exactly(layers, loops, tokens):
    config = LoopedConfig.tiny(
        " ".join(["window"] * layers), loops, options={"window": {"sliding_window": 5}}
    )
    assert tokens_reached(config) == tokens
    assert tokens < 1 + loops * layers * 5
    h = jax.random.normal(jax.random.key(0), (24, 3))
    jacobian = jax.jit(jax.jacrev(lambda h: windows(h, 5, layers * loops)[-1]))(h)
    seen = np.any(np.asarray(jacobian) != 0, axis=(0, 2))
    np.testing.assert_array_equal(seen, np.arange(24) > 23 - tokens)


def test_other_layers_reach_everything():
    assert tokens_reached(LoopedConfig.tiny("window gdn", 3)) is None
    assert tokens_reached(LoopedConfig.tiny("full")) is None


@jax.jit
def spread(layers, share, still):
    """Weight of a token in the later ones, by distance, after averaging windows of five.

    It stands at position 4, where windows are complete; the averaging is linear, so what becomes
    of a one at that position is its weight.
    """

    def layer(_, h):
        mean, _ = softmax_attention(still, still, h, sliding_window=5)
        return share * h + (1 - share) * mean

    h = jax.lax.fori_loop(0, layers, layer, still.at[0, 4].set(1.0))
    return h[0, 4:, 0, 0]


def averages(layers, share):
    return np.asarray(spread(layers, share, jnp.zeros((1, 260, 1, 1))))


def test_influence_falls_geometrically_with_every_window(float64):
    window, share, time = 5, 0.95, 256
    for layers in (4, 16):
        weight = averages(layers, share)
        assert weight.sum() == pytest.approx(1.0)
        bound = [influence_bound(distance, window, layers, share) for distance in range(time)]
        assert np.all(weight <= np.array(bound) + EXACT)
        np.testing.assert_array_equal(weight == 0, np.arange(time) > layers * (window - 1))
        # The mass of each further window, as part of the one before.
        mass = weight[1 : 1 + 3 * window].reshape(3, window).sum(1)
        assert np.all(mass[1:] < 0.5 * mass[:-1])


def test_more_loops_do_look_further(float64):
    """(1 - a)^ceil(D / w) would not depend on loops; the number of ways to look back does."""
    window, share = 5, 0.95
    horizon = []
    for layers in (4, 16, 64):
        beyond = 1 - np.cumsum(averages(layers, share))
        horizon.append(int(np.argmax(beyond < 0.01)) / window)
        # Mass further away than d windows is that of looking back more than d times.
        for looks in (1, 2, 3):
            reach = looks * (window - 1)
            tail = sum(
                math.comb(layers, m) * (1 - share) ** m * share ** (layers - m)
                for m in range(looks + 1, layers + 1)
            )
            assert beyond[reach] <= tail + EXACT
    assert horizon[0] < 1 < horizon[1] < 2 < horizon[2]


def test_influence_arguments_are_checked():
    with pytest.raises(ValueError, match="window 1"):
        influence_bound(3, 1, 4, 0.9)


# Bounds: what keeps the state, and the stream of a looped model, from growing.


def test_a_correction_never_expands_the_state(float64):
    """Unit keys, strength up to one, any decay: ||S_t|| <= ||S_(t-1)|| + beta ||v_t||."""
    rng, time, size = np.random.default_rng(0), 64, 6
    keys, values = unit_keys(time, size), rng.normal(size=(time, size))
    beta, g = rng.uniform(0, 1, time), -rng.exponential(1, time) * rng.integers(0, 2, time)

    def step(state, token):
        key, value, decay, strength = (x[None, None] for x in token)
        _, state = gated_delta_net_step(key, key, value, decay, strength, state)
        return state, state[0, 0]

    tokens = tuple(map(jnp.asarray, (keys, values, g, beta)))
    _, states = jax.lax.scan(step, jnp.zeros((1, 1, size, size)), tokens)
    norm = np.linalg.norm(states, 2, axis=(1, 2))
    before = np.concatenate([[0.0], norm[:-1]])
    assert np.all(norm <= np.exp(g) * before + beta * np.linalg.norm(values, axis=1) + EXACT)


def test_the_bound_holds_in_every_loop_of_a_model():
    """Each loop starts from an empty state and adds beta ||v_t|| a token at the most."""
    model, tokens = small("gdn", loops=4, options={"gdn": {"value_size": 8}}), some_tokens(batch=2)

    @jax.jit
    def a_loop(model, h, rho):
        block = model.blocks[0]
        inputs, _, _ = block.mixer.project(block.mixer_norm(h), None, None)

        def step(state, token):
            _, state = gated_delta_net_step(*token, state)
            return state, state

        empty = block.mixer.empty_cache(model.config, 2, 1).state
        _, states = jax.lax.scan(step, empty, tuple(jnp.moveaxis(x, 1, 0) for x in inputs))
        return model.loop(h, rho)[0], jnp.moveaxis(states, 0, 1), inputs

    h = model.embedding(tokens)
    for rho in model.rho[...]:
        h, states, (_, _, v, g, beta) = a_loop(model, h, rho)
        norm = np.linalg.norm(states, 2, axis=(-2, -1))
        before = np.concatenate([np.zeros_like(norm[:, :1]), norm[:, :-1]], axis=1)
        most = np.exp(g) * before + beta * np.linalg.norm(v, axis=-1)
        assert np.all(norm <= (1 + FLOAT32_ROUNDING) * most)
        # The bound is near: it is no statement about empty states.
        assert np.max(norm / most) > 0.9


def test_keys_must_not_be_long(float64):
    """Up to strength 2 a unit key contracts; a longer one makes an eigenvalue below -1."""
    norm = lambda key, beta: np.linalg.norm(  # noqa: E731
        effective_transition(jnp.asarray(key), jnp.asarray([beta])), 2
    )
    for beta in (0.1, 1.0, 2.0):
        assert norm(unit_keys(1, 4), beta) <= 1 + EXACT
    assert norm(1.5 * unit_keys(1, 4), 1.0) == pytest.approx(1.5**2 - 1)


def test_writing_one_key_again_and_again(float64):
    """The delta rule replaces and stays at the value; retention adds up to 1 / (1 - decay)."""
    time, decay = 400, 0.97
    one, value = jnp.ones((1, time, 1, 1)), jnp.full((1, time, 1, 1), 3.0)
    _, replaced = delta_net(one, one, value, jnp.full((1, time, 1), 0.5), implementation="scan")
    log_decay = jnp.log(jnp.array([decay]))
    _, added = retention(one, one, value, log_decay=log_decay, implementation="scan")
    assert replaced.item() == pytest.approx(3.0)
    assert added.item() == pytest.approx(3.0 * (1 - decay**time) / (1 - decay))


@pytest.mark.parametrize("word", ["full", "gdn"])
def test_the_stream_and_its_gradient_do_not_explode_over_loops(word):
    """Each block reads a normalised stream, so a loop adds and does not multiply (at the start)."""
    loops = 8
    model, tokens = small(word, loops), some_tokens(batch=2)
    model.rho[...] = jnp.zeros_like(model.rho[...])

    @jax.jit
    def per_loop(model, probes):
        def body(h, probe):
            h = model.loop(h, None)[0] + probe
            return h, h

        h, states = jax.lax.scan(body, model.embedding(tokens), probes)
        return jnp.mean(jax.nn.logsumexp(model.head(h), axis=-1)), states

    probes = jnp.zeros((loops, *tokens.shape, model.config.width))
    gradient, states = jax.jit(jax.grad(per_loop, argnums=1, has_aux=True))(model, probes)
    size, slope = (np.linalg.norm(x, axis=-1) for x in (states, gradient))
    print(f"{word}: max |h| after each loop {np.abs(states).max(axis=(1, 2, 3))}")
    print(f"{word}: norm of the gradient there {np.linalg.norm(slope, axis=(1, 2))}")
    assert np.all(np.isfinite(size))
    assert np.all(np.isfinite(slope))
    # Linear growth: no loop adds more than the first did.
    largest = size.max(axis=(1, 2))
    assert np.all(np.diff(largest) <= largest[0])
    # A norm's slope goes as 1 / |h|. What is left may not double in every loop, which would
    # make 64 of it between the second and the last.
    relative = np.sum(size * slope, axis=(1, 2))
    assert np.max(relative[1:]) < 4 * np.min(relative[1:])
