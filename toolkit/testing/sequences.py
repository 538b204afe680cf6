"""The contract of token mixers on sequences, as functions of a row that raise AssertionError.

Each compares the row's function with the row's reference, the equation token by token, or with
itself on other inputs.
"""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from toolkit.attention import Mixer, draw_inputs, retention_log_decay
from toolkit.attention.mixers import check_state

FLOAT64_TOLERANCE = 1e-11
FLOAT32_TOLERANCE = 2e-5
# Root mean square of the error over that of the result, as flash-linear-attention tests it.
BFLOAT16_OUTPUT_RATIO = 0.005
BFLOAT16_GRADIENT_RATIO = 0.008
BFLOAT16_GATE_GRADIENT_RATIO = 0.02
SELECTING = frozenset(("selected_tokens", "selected_entries"))  # any tokens, by their scores
TIME = 37  # odd, longer than a chunk
DOCUMENTS = np.repeat([0, 1, 2], [12, 13, 12])[None].repeat(2, axis=0)


def values(row, inputs):
    """The input named v."""
    return inputs[row.names.index("v")]


def output(row) -> Any:
    """(*inputs) -> out, compiled once per row and shape."""
    return _output(row.function, tuple(row.options.items()))


@cache
def _output(function, options):
    return jax.jit(lambda *inputs: function(*inputs, **dict(options))[0])


def output_and_gradients(function, row, inputs, cotangent, segment_ids=None):
    """Output and the gradient of every input, for a cotangent of the output."""
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
    """Every leaf within a relative and absolute tolerance."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)


def random_cotangent(row, inputs, dtype=None):
    """An array like the outputs: with the tokens and heads of q and the size of v."""
    shape = (*inputs[0].shape[:3], values(row, inputs).shape[-1])
    return jnp.asarray(np.random.default_rng(1).standard_normal(shape), dtype or inputs[0].dtype)


def value_and_gradient_equal_the_reference(row: Mixer, time: int = TIME) -> None:
    """Outputs and all gradients, in float64."""
    with jax.enable_x64(True):
        inputs = draw_inputs(row, time, dtype=jnp.float64)
        cotangent = random_cotangent(row, inputs)
        got = output_and_gradients(row.function, row, inputs, cotangent)
        wanted = output_and_gradients(row.reference, row, inputs, cotangent)
        assert all(x.dtype == jnp.float64 for x in got)
        assert_close(got, wanted, FLOAT64_TOLERANCE)


def bfloat16_stays_within_the_ratios(row: Mixer) -> None:
    """Of the error's root mean square to the result's."""
    inputs = draw_inputs(row, TIME, dtype=jnp.bfloat16, heads=4)
    cotangent = random_cotangent(row, inputs, jnp.float32)
    exact = [x.astype(jnp.float32) for x in inputs]
    got = output_and_gradients(row.function, row, inputs, cotangent)
    wanted = output_and_gradients(row.reference, row, exact, cotangent)
    ratios = [BFLOAT16_OUTPUT_RATIO] + [
        BFLOAT16_GATE_GRADIENT_RATIO if array.is_gate else BFLOAT16_GRADIENT_RATIO
        for array in row.inputs
    ]
    for a, b, ratio in zip(got, wanted, ratios, strict=True):
        assert a.dtype == jnp.bfloat16
        error = np.asarray(a, np.float64) - np.asarray(b, np.float64)
        assert np.sqrt(np.mean(error**2)) <= ratio * np.sqrt(np.mean(np.asarray(b) ** 2))


def prefill_and_steps_equal_one_pass(row: Mixer) -> None:
    """Two pieces and then single tokens give what one call gives."""
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
        step: Any = jax.jit(partial(row.step, **row.options))
        for t in range(30, TIME):
            out, state = step(*(x[:, t] for x in inputs), state)
            pieces.append(out[:, None])
        assert_close(jnp.concatenate(pieces, axis=1), whole, FLOAT64_TOLERANCE)
        # A state that changed shape, dtype or weak type would compile again at every token.
        assert step._cache_size() == 1


def the_future_does_not_change_the_past(row: Mixer) -> None:
    """Bit for bit."""
    run = output(row)
    inputs = draw_inputs(row, TIME)
    other = draw_inputs(row, TIME, seed=1)
    for now in (1, 20, 33):
        both = zip(inputs, other, strict=True)
        changed = [jnp.concatenate([x[:, :now], y[:, now:]], axis=1) for x, y in both]
        past, perturbed = run(*inputs)[:, :now], run(*changed)
        np.testing.assert_array_equal(past, perturbed[:, :now])
        assert not np.array_equal(perturbed[:, now:], run(*inputs)[:, now:])


def packed_documents_equal_separate_ones(row: Mixer) -> None:
    """Values and gradients, with three documents in one sequence."""
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


def a_state_remembers_the_last_document(row: Mixer) -> None:
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
        step: Any = jax.jit(partial(row.step, **row.options))
        for t in range(30, TIME):
            out, state = step(*(x[:, t] for x in inputs), state)
            pieces.append(out[:, None])
        got = jnp.concatenate(pieces, axis=1)
        for place, start in enumerate(starts):
            alone, _ = read(*(x[place : place + 1, start:] for x in inputs))
            assert_close(got[place : place + 1, start:], alone, FLOAT64_TOLERANCE)


def what_is_not_finite_reaches_no_other(
    row: Mixer, number: float = np.nan, documents: Any = None
) -> None:
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
        for place, array in enumerate(row.inputs):
            spoilt = inputs[place].at[(0, token) + (0,) * (len(array.axes) - 2)].set(number)
            out, *gradients = run([*inputs[:place], spoilt, *inputs[place + 1 :]], cotangent)
            # It may not be selected.
            if np.isnan(number) and SELECTING.isdisjoint(row.options):
                assert np.isnan(out[0, token, 0]).any(), array.name
            # Bit for bit where no legitimate number changed a chunk's decays.
            tolerance = 0 if documents is None and np.isnan(number) else FLOAT64_TOLERANCE
            assert_close(out[~is_spoilt], clean[0][~is_spoilt], tolerance)
            for got, wanted in zip(gradients, clean[1:], strict=True):
                assert np.isfinite(got).all(), array.name
                kept = ~is_spoilt if documents is not None else slice(None)
                np.testing.assert_allclose(got[kept], wanted[kept], atol=FLOAT64_TOLERANCE)


def vmap_equals_a_loop(row: Mixer) -> None:
    """Over a stack of inputs."""
    draws = [draw_inputs(row, TIME, seed=seed) for seed in range(3)]
    run = output(row)
    stacked = [jnp.stack(arrays) for arrays in zip(*draws, strict=True)]
    assert_close(
        jax.jit(jax.vmap(run))(*stacked),
        jnp.stack([run(*inputs) for inputs in draws]),
        FLOAT32_TOLERANCE,
    )


def shard_map_over_batch_and_heads_equals_one_device(row: Mixer) -> None:
    """On four devices, simulated or not."""
    mesh = jax.make_mesh((2, 2), ("data", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    inputs = draw_inputs(row, TIME)
    # An index serves all heads: every device has it whole.
    placed = {"batch": "data", "heads": "heads"}
    specs = tuple(PartitionSpec(*(placed.get(axis) for axis in array.axes)) for array in row.inputs)

    # What is constant in a head belongs to the whole model's heads: each device is given its own.
    constants = {"log_decay": retention_log_decay(2)} if row.name == "retention" else {}

    def loss(constants, *inputs):
        out, _ = row.function(*inputs, **constants, **row.options)
        return jnp.sum(jnp.sin(out), axis=(1, 3))

    sharded = jax.shard_map(
        loss,
        mesh=mesh,
        in_specs=(PartitionSpec("heads"), *specs),
        out_specs=PartitionSpec("data", "heads"),
    )

    def value_and_gradients(function):
        run = jax.jit(
            jax.value_and_grad(
                lambda *x: jnp.sum(function(constants, *x)), argnums=range(len(inputs))
            )
        )
        return run(*inputs)

    assert_close(value_and_gradients(sharded), value_and_gradients(loss), FLOAT32_TOLERANCE)


def a_second_call_does_not_compile_again(row: Mixer) -> None:
    """Of the same shapes."""
    run: Any = output(row)
    run(*draw_inputs(row, TIME))
    programs = run._cache_size()
    run(*draw_inputs(row, TIME, seed=1))
    assert run._cache_size() == programs


def sequence_contracts() -> dict[str, Any]:
    """By name: what every mixer promises, as functions of its row."""
    plain = (
        value_and_gradient_equal_the_reference,
        bfloat16_stays_within_the_ratios,
        prefill_and_steps_equal_one_pass,
        the_future_does_not_change_the_past,
        packed_documents_equal_separate_ones,
        a_state_remembers_the_last_document,
        vmap_equals_a_loop,
        shard_map_over_batch_and_heads_equals_one_device,
        a_second_call_does_not_compile_again,
    )
    found = {contract.__name__: contract for contract in plain}
    found["a_state_knows_its_class"] = check_state
    found["one_token_equals_the_reference"] = partial(
        value_and_gradient_equal_the_reference, time=1
    )
    for number in (np.nan, np.inf, -np.inf):
        for name, documents in (("one", None), ("packed", DOCUMENTS)):
            found[f"{what_is_not_finite_reaches_no_other.__name__}-{name}-{number}"] = partial(
                what_is_not_finite_reaches_no_other, number=number, documents=documents
            )
    return found
