"""Every family's router with every form of the experts' products is the equation of `mixture`."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64 import enable_x64
from tiers import by_night

from toolkit.experts import (
    ACTIVATIONS,
    ROUTERS,
    WITHOUT_GATE,
    expert_loads,
    mixture,
    mixture_reference,
    route,
    router_logits,
    shared_expert,
    silu_gate,
)
from toolkit.experts.products import Weights, grouped, megablox, padded

FORMS = ("blocks", "dense", "gather", "padded")
EXACT = 1e-12  # relative to the largest number, in float64
FLOAT32 = 2e-6
BFLOAT16 = 2.0**-6  # two roundings of values of the size of the largest
WIDTH, HIDDEN, EXPERTS, CHOSEN = 8, 6, 16, 2
# Their switches, but for numbers, are those of mixtral and deepseek_v3.
LIKE_OTHERS = {"qwen3_moe", "qwen3_next", "qwen3_5_moe", "kimi_k2", "kimi_linear"}
BIASES = ("gate_bias", "up_bias", "down_bias")


def draw(row, tokens=(7,), experts=EXPERTS, chosen=CHOSEN, dtype=jnp.float32, seed=0):
    """Tokens, a routing by the row, and arguments of `mixture`; the logits have no ties."""
    keys = iter(jax.random.split(jax.random.key(seed), 12))

    def normal(*shape):
        return jax.random.normal(next(keys), shape, dtype)

    x, kernel = normal(*tokens, WIDTH), normal(WIDTH, experts)
    bias, choice_bias = normal(experts), 0.3 * normal(experts)
    logits = router_logits(x, kernel, bias if row.has_logit_bias else None)
    routing = route(
        logits, chosen, choice_bias=choice_bias if row.has_choice_bias else None, **row.switches
    )
    shapes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    weights = [normal(experts, *shape) for shape in shapes]
    weights[0] = None if row.activation in WITHOUT_GATE else weights[0]
    drawn = {name: normal(experts, s[1]) for name, s in zip(BIASES, shapes, strict=True)}
    named = {
        "activation": ACTIVATIONS[row.activation],
        **(drawn if row.has_biases else dict.fromkeys(BIASES)),
    }
    return x, routing, weights, named


def close(found, wanted, tolerance):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape
        assert np.isfinite(a).all()
        assert np.abs(a - b).max(initial=0) <= tolerance * max(1.0, np.abs(b).max(initial=0))


@functools.cache
def value_and_gradient(name, form=None):
    """In float64, of the form, or of the equation."""
    with enable_x64(True):
        x, routing, weights, named = draw(ROUTERS[name], dtype=jnp.float64)
        biases = {name: named[name] for name in BIASES if named[name] is not None}
        probe = jax.random.normal(jax.random.key(9), x.shape, jnp.float64)
        function = functools.partial(mixture, implementation=form) if form else mixture_reference

        @jax.jit
        @functools.partial(jax.value_and_grad, argnums=(0, 1, 2, 3))
        def loss(x, shares, weights, biases):
            routed = routing._replace(weights=shares)
            how = {"activation": named["activation"], **biases}
            return (function(x, routed, *weights, **how) * probe).sum()

        return jax.tree.map(np.asarray, loss(x, routing.weights, weights, biases))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "nemotron_h"])
def test_value_and_gradient_of_the_equation_in_float64(name, form):
    """The other rows have the experts of these and other shares, which the equation takes alike."""
    close(value_and_gradient(name, form), value_and_gradient(name), EXACT)


@pytest.mark.parametrize("name", by_night(LIKE_OTHERS, ROUTERS))
def test_every_row_routes_and_mixes(name):
    """Distinct experts of few groups, weights that add up, and the values of the equation."""
    row = ROUTERS[name]
    x, routing, weights, named = draw(row, tokens=(3, 5))
    experts = np.sort(np.asarray(routing.experts), axis=-1)
    assert (np.diff(experts) > 0).all()
    assert experts.min() >= 0
    assert experts.max() < EXPERTS
    groups = row.switches.get("groups", 1)
    used = [len(set(token // (EXPERTS // groups))) for token in experts.reshape(-1, CHOSEN)]
    assert max(used) <= row.switches.get("chosen_groups", 1)
    total = routing.weights.sum(-1)
    if row.switches.get("normalise", True):
        np.testing.assert_allclose(total, row.switches.get("scale", 1.0), rtol=1e-6)
    else:
        assert np.ptp(total) > 0.01
    np.testing.assert_allclose(routing.probabilities.sum(-1), 1, rtol=1e-6)
    wanted = mixture_reference(x[:1, :2], at_start(routing), *weights, **named)
    close(mixture(x, routing, *weights, **named)[:1, :2], wanted, FLOAT32)


def at_start(routing):
    return jax.tree.map(lambda a: a[:1, :2], routing)


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_rounds_no_worse_than_its_inputs(form):
    x, routing, weights, named = draw(ROUTERS["gpt_oss"])
    wanted = mixture_reference(x, routing, *weights, **named)
    half = jax.tree.map(
        lambda a: a.astype(jnp.bfloat16), (x, weights, {n: named[n] for n in BIASES})
    )
    found = mixture(
        half[0], routing, *half[1], **half[2], activation=named["activation"], implementation=form
    )
    assert found.dtype == jnp.bfloat16
    close(found.astype(jnp.float32), wanted, BFLOAT16)


@pytest.mark.parametrize("form", [*FORMS, None])
@pytest.mark.parametrize("tokens", [(1,), (1, 1), (0,), (2, 0), ()])
def test_any_number_of_tokens(tokens, form):
    x, routing, weights, named = draw(ROUTERS["qwen3_moe"], tokens=tokens)
    found = mixture(x, routing, *weights, **named, implementation=form)
    if x.size:
        close(found, mixture_reference(x, routing, *weights, **named), FLOAT32)
    assert found.shape == x.shape


@pytest.mark.parametrize("form", FORMS)
def test_tokens_in_another_order_give_the_same_bits(form):
    x, routing, weights, named = draw(ROUTERS["mixtral"], tokens=(37,))
    order = np.random.default_rng(0).permutation(37)
    moved = jax.tree.map(lambda a: a[order], routing)
    found = mixture(x[order], moved, *weights, **named, implementation=form)
    wanted = mixture(x, routing, *weights, **named, implementation=form)[order]
    # The rows of a product may be added up in another order where they lie elsewhere in a block.
    close(found, wanted, FLOAT32)


@pytest.mark.parametrize("form", FORMS)
def test_what_others_hold_changes_no_bit_of_a_token(form):
    """Causality and documents need no mask: also not when the others are NaN."""
    x, routing, weights, named = draw(ROUTERS["deepseek_v2"], tokens=(19,))
    here = mixture(x, routing, *weights, **named, implementation=form)
    other = x.at[7].set(jnp.nan)
    found = mixture(other, routing, *weights, **named, implementation=form)
    assert np.isnan(found[7]).all()
    keep = np.arange(19) != 7
    np.testing.assert_array_equal(found[keep], here[keep])


@pytest.mark.parametrize("form", FORMS)
def test_an_expert_that_nobody_chose_shows_nowhere(form):
    """Its NaN reaches no value and no gradient, and its own gradient is 0."""
    x, routing, weights, named = draw(ROUTERS["mixtral"], tokens=(2,))
    absent = next(e for e in range(EXPERTS) if e not in np.asarray(routing.experts))
    broken = [w.at[absent].set(jnp.nan) for w in weights]

    def gradients(x, weights):
        loss = lambda x, w: mixture(x, routing, *w, **named, implementation=form).sum()  # noqa: E731
        return jax.value_and_grad(loss, argnums=(0, 1))(x, weights)

    (value, (d_x, d_weights)), wanted = gradients(x, broken), gradients(x, weights)
    close((value, d_x), (wanted[0], wanted[1][0]), FLOAT32)
    assert all((d[absent] == 0).all() for d in wanted[1][1])
    keep = np.arange(EXPERTS) != absent
    close([d[keep] for d in d_weights], [d[keep] for d in wanted[1][1]], FLOAT32)


def test_experts_by_other_numbers_are_the_same_experts():
    row = ROUTERS["qwen3_moe"]
    x, _, weights, named = draw(row)
    kernel = jax.random.normal(jax.random.key(5), (WIDTH, EXPERTS))
    order = np.random.default_rng(0).permutation(EXPERTS)

    def run(kernel, weights):
        routing = route(router_logits(x, kernel), CHOSEN, **row.switches)
        return mixture(x, routing, *weights, **named)

    close(run(kernel[:, order], [w[order] for w in weights]), run(kernel, weights), FLOAT32)


def test_one_expert_and_experts_that_are_alike_are_a_plain_layer():
    x = jax.random.normal(jax.random.key(0), (9, WIDTH))
    gate, up, down = (
        jax.random.normal(jax.random.key(seed), shape)
        for seed, shape in enumerate(((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)))
    )
    wanted = (jax.nn.silu(x @ gate) * (x @ up)) @ down
    close(shared_expert(x, gate, up, down), wanted, FLOAT32)
    one = [w[None] for w in (gate, up, down)]
    close(mixture(x, route(jnp.ones((9, 1)), 1, normalise=False), *one), wanted, FLOAT32)
    many = [jnp.repeat(w, 5, axis=0) for w in one]
    close(mixture(x, route(x[:, :5], 3), *many), wanted, FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "width"), [((150,), 20), ((1,), 160)])
def test_the_grouped_product_of_megablox_interpreted(tokens, width):
    """Compiled in test_tpu.py. An empty expert, rows that fill no tile, narrow matrices."""
    keys = jax.random.split(jax.random.key(0), 6)
    experts, hidden = 5, 24
    x = jax.random.normal(keys[0], (*tokens, width))
    routing = route(jax.random.normal(keys[1], (*tokens, experts)).at[:, 3].set(-9), 2)
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    drawn = [jax.random.normal(k, (experts, *s)) for k, s in zip(keys[2:], shapes, strict=False)]
    biases = [jnp.ones((experts, s[1])) for s in shapes]

    def loss(form):
        def total(x, drawn, biases):
            return (form(x, Weights(*drawn, *biases)) ** 2).sum()

        return jax.value_and_grad(total, argnums=(0, 1, 2))(x, drawn, biases)

    def dense(x, weights):
        share = jnp.ones(routing.weights.shape)
        out = [
            mixture(x, routing._replace(weights=share * (jnp.arange(2) == j)), *weights[:3],
                    **dict(zip(BIASES, weights[3:], strict=True)), implementation="dense")
            for j in range(2)
        ]  # fmt: skip
        return jnp.stack(out, axis=1)

    ours = loss(lambda x, w: megablox(silu_gate, x, routing.experts, w, interpret=True))
    assert int(expert_loads(routing.experts, experts)[3]) == 0
    assert all((array[3] == 0).all() for array in ours[1][1])
    close(ours, loss(dense), 1e-4 * width)


@pytest.mark.parametrize(("tokens", "own"), [(150, 5), (3, 0), (90, 2)])
def test_pairs_of_other_devices_are_not_multiplied(tokens, own):
    """What the product leaves beyond its experts' rows is NaN here, and shows nowhere."""
    keys, count, width, hidden = jax.random.split(jax.random.key(0), 6), 5, 20, 24
    x = jax.random.normal(keys[0], (tokens, width))
    experts = jax.random.randint(keys[1], (tokens, 2), 0, count + 4)
    experts = jnp.where(experts < own, experts, count)  # expert `count` and those from `own` on
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    weights = [jax.random.normal(k, (count, *s)) for k, s in zip(keys[2:], shapes, strict=False)]
    biases = [jnp.ones((count, s[1])) for s in shapes]
    seen = []

    def times(sizes, rows, matrices):
        seen.append(int(sizes.sum()))
        beyond = (jnp.arange(len(rows)) >= sizes.sum())[:, None]
        return jnp.where(beyond, jnp.nan, jax.lax.ragged_dot(rows, matrices, sizes))

    def loss(form):
        def total(x, *weights):
            out = form(silu_gate, x, experts, Weights(*weights))
            return jnp.where((experts < count)[..., None], out**2, 0).sum()

        return jax.value_and_grad(total, argnums=range(7))(x, *weights, *biases)

    ours = loss(functools.partial(grouped, times, 8))
    assert set(seen) == {max(1, int((experts < count).sum()))}
    close(ours, loss(padded), 1e-4 * width)


def test_a_given_expert_that_is_none_changes_no_other_token():
    _, routing, _, _ = case = draw(ROUTERS["mixtral"], tokens=(40,))
    x, _, weights, named = case
    for form in ("blocks", "padded", "dense", "gather"):
        good = mixture(x, routing, *weights, **named, implementation=form)
        bad = routing._replace(experts=routing.experts.at[3, 1].set(-1))
        found = mixture(x, bad, *weights, **named, implementation=form)
        np.testing.assert_array_equal(np.delete(found, 3, 0), np.delete(good, 3, 0), err_msg=form)


@pytest.mark.parametrize("form", by_night(FORMS[1:], FORMS))
def test_derivatives_of_any_order_in_both_modes(form):
    with enable_x64(True):
        x, routing, weights, named = draw(ROUTERS["gpt_oss"], tokens=(4,), dtype=jnp.float64)

        def of(form):
            return lambda x: mixture(x, routing, *weights, **named, implementation=form).sum()

        point, towards = x, jnp.cos(x)
        for how in (
            lambda f: jax.jvp(f, (point,), (towards,))[1],
            lambda f: jax.jvp(jax.grad(f), (point,), (towards,))[1],
            lambda f: jax.grad(lambda x: (jax.grad(f)(x) * towards).sum())(point),
        ):
            close(how(of(form)), how(of("dense")), EXACT)


@pytest.mark.parametrize("form", by_night(FORMS[1:], FORMS))
def test_vmap_is_a_loop(form):
    x, routing, weights, named = draw(ROUTERS["mixtral"], tokens=(3, 6))

    def run(x, routing):
        return mixture(x, routing, *weights, **named, implementation=form)

    close(jax.vmap(run)(x, routing), run(x, routing), FLOAT32)
    models = [jnp.stack([w, 2 * w]) for w in weights]
    found = jax.vmap(lambda *w: mixture(x, routing, *w, **named, implementation=form))(*models)
    close(found[1], mixture(x, routing, *(2 * w for w in weights), **named), FLOAT32)


@pytest.mark.parametrize("form", FORMS)
def test_a_second_call_compiles_nothing_and_reads_nothing(form):
    x, _, weights, named = draw(ROUTERS["deepseek_v3"])
    bias = jnp.zeros(EXPERTS)

    def call():
        routed = route(router_logits(x, kernel), CHOSEN, choice_bias=bias)
        return mixture(x, routed, *weights, **named, implementation=form)

    kernel = jnp.ones((WIDTH, EXPERTS))
    call()
    with jax.transfer_guard_device_to_host("disallow"), compilations() as count:
        call()
    assert not count


@contextlib.contextmanager
def compilations():
    """A list of what is compiled meanwhile."""
    found, is_on = [], [True]

    def listen(event, *_, **__):
        if is_on and event == "/jax/core/compile/backend_compile_duration":
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        is_on.clear()


def test_the_loop_keeps_no_copy_of_the_weights():
    """Temporaries of "blocks" stay below the weights; those of "padded" do not."""
    experts, width, hidden, tokens = 64, 32, 64, 64
    shapes = [(experts, width, hidden), (experts, width, hidden), (experts, hidden, width)]
    routing = route(jax.random.normal(jax.random.key(0), (tokens, experts)), 2)
    bytes_of_weights = 4 * 3 * experts * width * hidden

    def temporaries(form):
        def loss(x, *weights):
            return mixture(x, routing, *weights, implementation=form).sum()

        arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in [(tokens, width), *shapes]]
        program = jax.jit(loss).lower(*arguments).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert temporaries("blocks") < bytes_of_weights < temporaries("padded")


def test_gradients_of_narrow_experts_lower_for_tpus():
    """Experts of 96 channels, as of Qwen3-30B-A3B cut over 8 chips: tiles of 96 columns, which the
    transposed product of the backward pass took too, were refused by Pallas."""
    x, experts = jax.ShapeDtypeStruct((64, 256), jnp.bfloat16), jnp.zeros((64, 2), jnp.int32)
    shapes = ((4, 256, 96), (4, 256, 96), (4, 96, 256))
    weights = Weights(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))

    def loss(x, weights):
        return megablox(silu_gate, x, experts, weights).sum()

    step = jax.jit(jax.grad(loss, argnums=(0, 1)))
    assert "tpu_custom_call" in step.trace(x, weights).lower(lowering_platforms=("tpu",)).as_text()
