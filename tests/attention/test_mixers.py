"""The table of mixers: every row complete, and its cost formulas held against the compiler's."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from toolkit.attention import MIXERS, ForgettingCache, KVCache, draw_inputs, mixer
from toolkit.attention.softmax.softmax_attention import softmax_attention
from toolkit.attention.table import mixer_page
from toolkit.bench.mixers.matrix_products import matrix_flops

# Matrix products are the formula; the compiler also counts exponentials, masks and sums.
FLOPS_TOLERANCE = 0.15
BATCH, HEADS, KEY, VALUE = 2, 4, 64, 128
SIZES = (HEADS, KEY, VALUE)
SPARSE = ("nsa", "moba", "dsa", "hca", "csa", "qsa")
ITERATED = ("mesa", "path")  # the compiler counts the body of a loop once


def compiled_flops(function, *inputs):
    return jax.jit(function).lower(*inputs).compile().cost_analysis()["flops"]


def first_of(function, **options):
    return lambda *inputs: function(*inputs, **options)[0]


def nbytes(tree):
    arrays = jax.tree.leaves(tree)
    return sum(x.nbytes for x in arrays if jnp.issubdtype(x.dtype, jnp.floating))


def draw(row, time):
    return draw_inputs(row, time, batch=BATCH, heads=HEADS, key=KEY, value=VALUE)


@pytest.mark.parametrize(
    ("name", "times"), [("gdn", (16, 32, 64)), ("mamba2", (16, 64)), ("linear", (64,))]
)
def test_forward_flops_of_one_chunk(name, times):
    """One chunk, since the compiler counts the body of a loop once."""
    row = mixer(name)
    for time in times:
        inputs = draw(row, time)
        counted = compiled_flops(first_of(row.function, chunk=time), *inputs)
        # The final state is not asked for here, so the compiler drops its product.
        dropped = 2 * BATCH * HEADS * time * KEY * VALUE
        wanted = row.forward_flops(BATCH, time, *SIZES, chunk=time) - dropped
        assert counted == pytest.approx(wanted, rel=FLOPS_TOLERANCE), time


def test_forward_flops_of_dense_attention():
    """Dense attention computes every pair; the formula counts those a query may see."""
    row, time = mixer("full"), 64
    q, k, v = draw(row, time)
    counted = compiled_flops(
        lambda q, k, v: softmax_attention(q, k, v, implementation="dense")[0], q, k, v
    )
    every_pair = row.forward_flops(BATCH, time, *SIZES) * 2 * time / (time + 1)
    assert counted == pytest.approx(every_pair, rel=FLOPS_TOLERANCE)


def test_pairs_of_a_window_are_counted_exactly():
    for time in (1, 5, 9):
        for window in (1, 4, 9, 20):
            t, s = np.indices((time, time))
            pairs = np.sum((s <= t) & (s > t - window))
            flops = MIXERS["window"].forward_flops(1, time, 1, 3, 5, sliding_window=window)
            assert flops == 2 * pairs * (3 + 5)


@pytest.mark.parametrize("name", MIXERS)
def test_step_flops(name):
    context = 256
    row = mixer(name)
    inputs = [x[:, 0] for x in draw(row, 1)]
    state = row.empty_state(BATCH, *SIZES, context, jnp.float32, **row.options)
    wanted = row.step_flops(BATCH, context, *SIZES, **row.options)
    if name in SPARSE:
        # The compiler also counts telling finite numbers, which is as much work as multiplying.
        assert matrix_flops(partial(row.step, **row.options), *inputs, state) == wanted
        return
    count = matrix_flops if name in ITERATED else compiled_flops
    counted = count(lambda *x: row.step(*x, **row.options), *inputs, state)
    if isinstance(state, (KVCache, ForgettingCache)):
        # The compiler also counts the branch that only runs for a cache holding NaN: a product,
        # a selection and a sum over the values.
        wanted += 3 * BATCH * HEADS * context * VALUE
    assert counted == pytest.approx(wanted, rel=FLOPS_TOLERANCE)


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_state_bytes_are_those_of_the_state(name, dtype):
    row = mixer(name)
    for context in (256, 1024):
        state = row.empty_state(BATCH, *SIZES, context, dtype, **row.options)
        element = jnp.dtype(dtype).itemsize
        counted = row.state_bytes(BATCH, context, *SIZES, element_bytes=element, **row.options)
        assert counted == nbytes(state)


@pytest.mark.parametrize("name", MIXERS)
def test_bytes_count_inputs_outputs_and_state_once(name):
    row, time = mixer(name), 512
    inputs = draw(row, time)
    out = BATCH * time * HEADS * VALUE * 4
    # k and q are as long as each other, and so are v and o.
    assert row.forward_bytes(BATCH, time, *SIZES, **row.options) == nbytes(inputs) + out
    if row.name in SPARSE:
        return  # a step reads a part of the state
    state = row.state_bytes(BATCH, time, *SIZES, **row.options)
    is_cache = row.name in ("full", "window", "fox", "path")
    token = (nbytes(inputs) + out) // time
    crossings = 1 if is_cache else 2  # a recurrent state is also written
    assert row.step_bytes(BATCH, time, *SIZES, **row.options) == crossings * state + token


@pytest.mark.parametrize("name", MIXERS)
def test_linear_time_is_what_the_formulas_say(name):
    row = mixer(name)
    flops = [row.forward_flops(1, time, *SIZES, **row.options) for time in (2**20, 2**21)]
    assert (flops[1] < 2.1 * flops[0]) == row.is_linear_time


def test_names_and_options_are_checked():
    assert mixer("window", sliding_window=7).options["sliding_window"] == 7
    assert MIXERS["window"].options["sliding_window"] == 256
    with pytest.raises(ValueError, match=r"one of 'full', 'window', 'linear', .*; got 'rwkv'"):
        mixer("rwkv")
    with pytest.raises(ValueError, match="'gdn' has the options: none; got sliding_window"):
        mixer("gdn", sliding_window=7)


@pytest.mark.parametrize("name", MIXERS)
def test_inputs_are_drawn_as_their_rows_say(name):
    row = mixer(name)
    sizes = {"batch": 3, "heads": 2, "key": 4, "value": 5, "steps": 6, "levels": 3}
    drawn = draw_inputs(row, 7, dtype=jnp.bfloat16, gate_dtype=jnp.float32, **sizes)
    sizes |= {"time": 7, "index_heads": 2, "pairs": 2}
    for one, x in zip(row.inputs, drawn, strict=True):
        assert x.shape == tuple(sizes[axis] for axis in one.axes)
        assert x.dtype == (jnp.float32 if one.is_gate else jnp.bfloat16)
        assert one.values.low <= jnp.min(x) <= jnp.max(x) <= one.values.high
        np.testing.assert_array_equal(x, x.astype(jnp.bfloat16).astype(x.dtype))


def test_the_page_of_mixers_is_what_the_rows_say():
    page = Path(__file__).parents[2] / "docs/mixers.md"
    assert page.read_text(encoding="utf-8") == mixer_page() + "\n", (
        "run: python -m toolkit.attention.table > docs/mixers.md"
    )


def test_the_page_says_of_every_mixer_what_it_can_do():
    lines = mixer_page().splitlines()
    header = next(line for line in lines if "initial state |" in line)
    rows = [line for line in lines[lines.index(header) + 2 :] if line.startswith("| `")]
    assert [line.split("`")[1] for line in rows] == list(MIXERS)
    cells = {line.split("`")[1]: [x.strip() for x in line.split("|")[-4:-1]] for line in rows}
    assert header.endswith("| mask and bias | lengths per row | kernels |")
    lengths = "`query_seq_lengths`, `key_value_seq_lengths`, `cache.length`"
    kernels = "`cudnn`: NVIDIA GPU; `splash`: TPU"
    assert cells["full"] == ["`mask`, `bias`", lengths, kernels]
    assert cells["gdn"] == ["no", "none", "`pallas`: TPU, Hopper GPU"]
    assert cells["dsa"] == ["no", "`cache.length`", "none"]


@pytest.mark.parametrize("name", MIXERS)
def test_the_page_names_implementations_that_exist(name):
    row = MIXERS[name]
    inputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in draw_inputs(row, 16)]
    for implementation in row.implementations:
        run = partial(row.function, implementation=implementation, **row.options)
        if implementation == "pallas":
            with pytest.raises(ValueError, match="needs a TPU or an NVIDIA GPU"):
                jax.jit(run).lower(*inputs)  # only then the platform is known
        else:
            jax.eval_shape(run, *inputs)
    with pytest.raises(ValueError, match="implementation"):
        jax.eval_shape(partial(row.function, implementation="none such"), *inputs)
