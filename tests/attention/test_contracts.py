"""What every token mixer promises: one suite that each row of `MIXERS` inherits."""

from functools import cache, partial

import beartype
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from toolkit import checking
from toolkit.attention import MIXERS, draw_inputs, mixer, retention_log_decay

FLOAT64_TOLERANCE = 1e-11
FLOAT32_TOLERANCE = 2e-5
# Root mean square of the error over that of the result, as flash-linear-attention tests it.
BFLOAT16_OUTPUT_RATIO = 0.005
BFLOAT16_GRADIENT_RATIO = 0.008
BFLOAT16_GATE_GRADIENT_RATIO = 0.02

WINDOW = 5
# So small that most of a sequence is not seen.
OPTIONS = {
    "window": {"sliding_window": WINDOW},
    "nsa": {"block_size": 3, "selected_blocks": 4, "sliding_window": WINDOW},
    "moba": {"block_size": 3, "selected_blocks": 3},
    "dsa": {"selected_tokens": 6},
}
TIME = 37  # odd, longer than a chunk
DOCUMENTS = np.repeat([0, 1, 2], [12, 13, 12])[None].repeat(2, axis=0)


@pytest.fixture(params=list(MIXERS))
def row(request):
    return mixer(request.param, **OPTIONS.get(request.param, {}))


def values(row, inputs):
    return inputs[row.names.index("v")]


def output(row):
    """(*inputs) -> out, compiled once per row and shape."""
    return _output(row.function, tuple(row.options.items()))


@cache
def _output(function, options):
    return jax.jit(lambda *inputs: function(*inputs, **dict(options))[0])


def output_and_gradients(function, row, inputs, cotangent, segment_ids=None):
    run = _value_and_gradients(function, tuple(row.options.items()))
    (_, out), gradients = run(inputs, cotangent, segment_ids)
    return out, *gradients


@cache
def _value_and_gradients(function, options):
    def loss(inputs, cotangent, segment_ids):
        out, _ = function(*inputs, segment_ids=segment_ids, **dict(options))
        return jnp.sum(out.astype(cotangent.dtype) * cotangent), out

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def assert_close(got, wanted, tolerance):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)


def random_cotangent(row, inputs, dtype=None):
    """An array like the outputs: with the tokens and heads of q and the size of v."""
    shape = (*inputs[0].shape[:3], values(row, inputs).shape[-1])
    return jnp.asarray(np.random.default_rng(1).standard_normal(shape), dtype or inputs[0].dtype)


@pytest.mark.parametrize("time", [pytest.param(1, marks=pytest.mark.by_family), TIME])
def test_value_and_gradient_equal_the_reference(row, time):
    with jax.enable_x64(True):
        inputs = draw_inputs(row, time, dtype=jnp.float64)
        cotangent = random_cotangent(row, inputs)
        got = output_and_gradients(row.function, row, inputs, cotangent)
        wanted = output_and_gradients(row.reference, row, inputs, cotangent)
        assert all(x.dtype == jnp.float64 for x in got)
        assert_close(got, wanted, FLOAT64_TOLERANCE)


@pytest.mark.by_family
def test_bfloat16_stays_within_the_ratios(row):
    inputs = draw_inputs(row, TIME, dtype=jnp.bfloat16, heads=4)
    cotangent = random_cotangent(row, inputs, jnp.float32)
    exact = [x.astype(jnp.float32) for x in inputs]
    got = output_and_gradients(row.function, row, inputs, cotangent)
    wanted = output_and_gradients(row.reference, row, exact, cotangent)
    ratios = [BFLOAT16_OUTPUT_RATIO] + [
        BFLOAT16_GATE_GRADIENT_RATIO if one.is_gate else BFLOAT16_GRADIENT_RATIO
        for one in row.inputs
    ]
    for a, b, ratio in zip(got, wanted, ratios, strict=True):
        assert a.dtype == jnp.bfloat16
        error = np.asarray(a, np.float64) - np.asarray(b, np.float64)
        assert np.sqrt(np.mean(error**2)) <= ratio * np.sqrt(np.mean(np.asarray(b) ** 2))


def test_prefill_and_steps_equal_one_pass(row):
    with jax.enable_x64(True):
        inputs = draw_inputs(row, TIME, dtype=jnp.float64)
        whole = output(row)(*inputs)
        batch, _, heads, key = inputs[0].shape
        value = values(row, inputs).shape[-1]
        state = row.empty_state(batch, heads, key, value, TIME, jnp.float64, **row.options)
        read = jax.jit(partial(row.function, **row.options))
        pieces = []
        for part in (slice(0, 15), slice(15, 30)):  # of one length: one program
            out, state = read(*(x[:, part] for x in inputs), initial_state=state)
            pieces.append(out)
        step = jax.jit(partial(row.step, **row.options))
        for t in range(30, TIME):
            out, state = step(*(x[:, t] for x in inputs), state)
            pieces.append(out[:, None])
        assert_close(jnp.concatenate(pieces, axis=1), whole, FLOAT64_TOLERANCE)
        # A state that changed shape, dtype or weak type would compile again at every token.
        assert step._cache_size() == 1


def test_the_future_does_not_change_the_past(row):
    run = output(row)
    inputs = draw_inputs(row, TIME)
    other = draw_inputs(row, TIME, seed=1)
    for now in (1, 20, 33):
        both = zip(inputs, other, strict=True)
        changed = [jnp.concatenate([x[:, :now], y[:, now:]], axis=1) for x, y in both]
        past, perturbed = run(*inputs)[:, :now], run(*changed)
        np.testing.assert_array_equal(past, perturbed[:, :now])
        assert not np.array_equal(perturbed[:, now:], run(*inputs)[:, now:])


@pytest.mark.by_family
def test_packed_documents_equal_separate_ones(row):
    with jax.enable_x64(True):
        inputs = draw_inputs(row, TIME, dtype=jnp.float64)
        cotangent = random_cotangent(row, inputs)
        packed = output_and_gradients(
            row.function, row, inputs, cotangent, segment_ids=jnp.asarray(DOCUMENTS)
        )
        for document in np.unique(DOCUMENTS):
            here = np.flatnonzero(DOCUMENTS[0] == document)
            alone = output_and_gradients(
                row.function, row, [x[:, here] for x in inputs], cotangent[:, here]
            )
            assert_close([x[:, here] for x in packed], alone, FLOAT64_TOLERANCE)


@pytest.mark.by_family
def test_a_state_remembers_the_last_document(row):
    """Sequences of different lengths, filled up in front, read in pieces and decoded together."""
    with jax.enable_x64(True):
        inputs = draw_inputs(row, TIME, dtype=jnp.float64)
        batch, _, heads, key = inputs[0].shape
        value = values(row, inputs).shape[-1]
        starts = (3, 20)  # in the first piece, in the second
        documents = jnp.arange(TIME)[None] >= jnp.asarray(starts)[:, None]
        state = row.empty_state(batch, heads, key, value, TIME, jnp.float64, **row.options)
        read = jax.jit(partial(row.function, **row.options))
        pieces = []
        for part in (slice(0, 15), slice(15, 30)):  # of one length: one program
            out, state = read(
                *(x[:, part] for x in inputs),
                initial_state=state,
                segment_ids=documents[:, part].astype(jnp.int32),
            )
            pieces.append(out)
        step = jax.jit(partial(row.step, **row.options))
        for t in range(30, TIME):
            out, state = step(*(x[:, t] for x in inputs), state)
            pieces.append(out[:, None])
        got = jnp.concatenate(pieces, axis=1)
        for one, start in enumerate(starts):
            alone, _ = read(*(x[one : one + 1, start:] for x in inputs))
            assert_close(got[one : one + 1, start:], alone, FLOAT64_TOLERANCE)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "documents",
    [
        pytest.param(None, id="one"),
        pytest.param(DOCUMENTS, id="packed", marks=pytest.mark.by_family),
    ],
)
def test_what_is_not_finite_reaches_no_other(row, number, documents):
    """Neither the tokens before it, nor another document (or padding, which is one), nor another
    sequence: no output, and no gradient of what is not spoilt."""
    token = 20  # inside a chunk and inside the second document
    is_spoilt = np.zeros((2, TIME), bool)
    is_spoilt[0, token:] = True if documents is None else documents[0, token:] == 1
    with jax.enable_x64(True):
        inputs = draw_inputs(row, TIME, dtype=jnp.float64)
        cotangent = jnp.where(is_spoilt[..., None, None], 0, random_cotangent(row, inputs))
        run = partial(output_and_gradients, row.function, row, segment_ids=documents)
        clean = run(inputs, cotangent)
        for place, one in enumerate(row.inputs):
            spoilt = inputs[place].at[(0, token) + (0,) * (len(one.axes) - 2)].set(number)
            out, *gradients = run([*inputs[:place], spoilt, *inputs[place + 1 :]], cotangent)
            if np.isnan(number) and row.name != "dsa":  # which may not have selected it
                assert np.isnan(out[0, token, 0]).any(), one.name
            # Bit for bit where no legitimate number changed a chunk's decays.
            tolerance = 0 if documents is None and np.isnan(number) else FLOAT64_TOLERANCE
            assert_close(out[~is_spoilt], clean[0][~is_spoilt], tolerance)
            for got, wanted in zip(gradients, clean[1:], strict=True):
                assert np.isfinite(got).all(), one.name
                kept = ~is_spoilt if documents is not None else slice(None)
                np.testing.assert_allclose(got[kept], wanted[kept], atol=FLOAT64_TOLERANCE)


@pytest.mark.by_family
def test_vmap_equals_a_loop(row):
    draws = [draw_inputs(row, TIME, seed=seed) for seed in range(3)]
    run = output(row)
    stacked = [jnp.stack(arrays) for arrays in zip(*draws, strict=True)]
    assert_close(
        jax.jit(jax.vmap(run))(*stacked),
        jnp.stack([run(*inputs) for inputs in draws]),
        FLOAT32_TOLERANCE,
    )


@pytest.mark.by_family
def test_shard_map_over_batch_and_heads_equals_one_device(row):
    mesh = jax.make_mesh((2, 2), ("data", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    inputs = draw_inputs(row, TIME)
    # An index serves all heads: every device has it whole.
    placed = {"batch": "data", "heads": "heads"}
    specs = tuple(P(*(placed.get(axis) for axis in one.axes)) for one in row.inputs)

    # What is constant in a head belongs to the whole model's heads: each device is given its own.
    constants = {"log_decay": retention_log_decay(2)} if row.name == "retention" else {}

    def loss(constants, *inputs):
        out, _ = row.function(*inputs, **constants, **row.options)
        return jnp.sum(jnp.sin(out), axis=(1, 3))

    sharded = jax.shard_map(
        loss, mesh=mesh, in_specs=(P("heads"), *specs), out_specs=P("data", "heads")
    )

    def value_and_gradients(function):
        run = jax.jit(
            jax.value_and_grad(
                lambda *x: jnp.sum(function(constants, *x)), argnums=range(len(inputs))
            )
        )
        return run(*inputs)

    assert_close(value_and_gradients(sharded), value_and_gradients(loss), FLOAT32_TOLERANCE)


def test_a_second_call_does_not_compile_again(row):
    run = output(row)
    run(*draw_inputs(row, TIME))
    programs = run._cache_size()
    run(*draw_inputs(row, TIME, seed=1))
    assert run._cache_size() == programs


@pytest.mark.by_family
def test_the_shapes_in_the_signatures_hold(row):
    def check(function):
        checked = jaxtyping.jaxtyped(typechecker=beartype.beartype)(function)
        return jax.jit(partial(checked, **row.options))

    inputs = draw_inputs(row, 3)
    out, _ = check(row.function)(*inputs)
    check(row.reference)(*inputs)
    state = row.empty_state(2, 2, 16, 8, 4, jnp.float32, **row.options)
    out_t, _ = check(row.step)(*(x[:, 0] for x in inputs), state)
    assert_close(out_t, out[:, 0], FLOAT32_TOLERANCE)


def test_wrong_inputs_are_named(row):
    named = dict(zip(row.names, draw_inputs(row, 6, heads=4), strict=True))

    def run(*, implementation=None, **changed):
        arrays = {**named, **changed}.values()
        return row.function(*arrays, implementation=implementation, **row.options)

    with pytest.raises(ValueError, match=r"q must have 4 axes .*got shape \(2, 6, 4\)"):
        run(q=named["q"][..., 0])
    with pytest.raises(ValueError, match=r"must have shape|multiple"):
        run(q=named["q"][:, :, :3])
    with pytest.raises(ValueError, match=r"v .*must have shape"):
        run(v=named["v"][:, :5])
    with pytest.raises(TypeError, match=r"one dtype"):
        run(v=named["v"].astype(jnp.bfloat16))
    with pytest.raises(ValueError, match=r"implementation must be "):
        run(implementation="fastest")
    if "g" in row.gates:
        message = r"g is a natural-log decay and must be <= 0"
        with checking(), pytest.raises(ValueError, match=message):
            run(g=-named["g"])
