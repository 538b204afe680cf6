"""`implementation="pallas"` from the mixers' side: heads, odd lengths, documents, states.

The kernels themselves are tested by device; here the TPU's run interpreted, and the GPU's are
lowered, in place of those of a device this machine does not have.
"""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from toolkit._compat import require_jax
from toolkit.attention import best_known, draw_inputs, mixer
from toolkit.attention.kernels import dispatch
from toolkit.attention.kernels.tpu import chunked as tpu_chunked
from toolkit.attention.kernels.tpu import step as tpu_step

TOLERANCE = 2e-5
TIME = 21


@pytest.fixture
def tpu_interpreted(monkeypatch):
    kernels = {
        "chunked": dispatch.over_rows(partial(tpu_chunked.chunked, interpret=True)),
        "step": partial(tpu_step.step, interpret=True),
    }
    monkeypatch.setattr(dispatch, "KERNELS", {"cpu": kernels.get})
    yield
    jax.clear_caches()  # the programs with these kernels


def quick(function):
    """Compiled without optimisation: a kernel interpreted is a large program, run once."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


@pytest.mark.by_family
@pytest.mark.parametrize(
    "name", ["mamba2", "gdn", pytest.param("kda", marks=pytest.mark.slow), "hgrn2"]
)
def test_equal_to_the_xla_form(tpu_interpreted, name):
    row = mixer(name)
    inputs = draw_inputs(row, TIME, heads=2)
    if "k" in row.names:  # one head of q and k serves both heads of v
        inputs = [x[:, :, :1] for x in inputs[:2]] + inputs[2:]
    state = jnp.asarray(np.random.default_rng(3).standard_normal((2, 2, 16, 8)), jnp.float32)
    documents = jnp.asarray(np.repeat([0, 1, 5], [4, 15, 2])[None].repeat(2, 0))

    def outputs_and_gradients(implementation, chunk):
        def loss(state, *inputs):
            out, final = row.function(
                *inputs,
                initial_state=state,
                segment_ids=documents,
                implementation=implementation,
                chunk=chunk,
            )
            return jnp.sum(jnp.sin(3 * out)) + jnp.sum(jnp.cos(2 * final)), (out, final)

        run = jax.grad(loss, argnums=range(len(inputs) + 1), has_aux=True)
        gradients, values = quick(run)(state, *inputs)
        return *values, *gradients

    got, wanted = outputs_and_gradients("pallas", 16), outputs_and_gradients("xla", None)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_fault_spares_the_head_that_shares_its_key(tpu_interpreted):
    """NaN in one head's value, then in the key and the query of both."""
    row = mixer("gdn")
    q, k, v, g, beta = draw_inputs(row, TIME, batch=1, heads=2)
    v = v.at[0, 3, 0].set(jnp.nan)
    k, q = k.at[0, 15, 0].set(jnp.nan), q.at[0, 6, 0].set(jnp.nan)

    def outputs_and_gradients(implementation):
        def loss(*inputs):
            out, state = row.function(*inputs, implementation=implementation, chunk=16)
            return jnp.nansum(out) + jnp.nansum(state), (out, state)

        run = jax.grad(loss, argnums=range(5), has_aux=True)
        gradients, values = quick(run)(q[:, :, :1], k[:, :, :1], v, g, beta)
        return *values, *gradients

    got, wanted = outputs_and_gradients("pallas"), outputs_and_gradients("xla")
    assert np.isnan(got[0]).any(axis=-1).sum() == 2 * (TIME - 15) + (15 - 3) + 1
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["retention", "gdn"])
def test_the_decode_step_equals_the_xla_form(tpu_interpreted, name):
    row = mixer(name)
    inputs = [x[:, 0] for x in draw_inputs(row, 1)]
    state = jnp.asarray(np.random.default_rng(3).standard_normal((2, 2, 16, 8)), jnp.float32)
    got = quick(partial(row.step, implementation="pallas"))(*inputs, state)
    for a, b in zip(got, row.step(*inputs, state), strict=True):
        np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)


def test_derivatives_that_kernels_lack_are_refused(tpu_interpreted):
    row = mixer("gdn")
    inputs = draw_inputs(row, 3, batch=1, heads=1, key=8, value=8)
    tokens, state = [x[:, 0] for x in inputs], jnp.zeros((1, 1, 8, 8))

    def loss(x):
        return jnp.sum(row.function(x, *inputs[1:], implementation="pallas")[0])

    def step(x):
        return jnp.sum(row.step(x, *tokens[1:], state, implementation="pallas")[0])

    def along(function):
        return lambda x: jax.jvp(function, (x,), (x,))[1]

    gradient = jax.grad(loss)
    of_cotangents = jax.grad(lambda x: jnp.sum(jax.vjp(loss, inputs[0])[1](jnp.sum(x))[0]))
    for run, what in (
        (along(loss), "no forward mode"),
        (along(gradient), "the gradient"),
        (jax.grad(lambda x: jnp.sum(gradient(x))), "the gradient"),
        (of_cotangents, "the gradient"),
        (along(step), "the step"),
        (jax.grad(step), "the step"),
    ):
        x = inputs[0] if what != "the step" else tokens[0]
        for call in (run, jax.jit(run)):
            with pytest.raises(NotImplementedError, match=rf'{what}.*; implementation="xla" has'):
                call(x)


@pytest.mark.parametrize(
    ("name", "platform", "kernel"),
    [
        ("linear", "cuda", "mosaic_gpu"),
        pytest.param("delta", "cuda", "mosaic_gpu", marks=pytest.mark.nightly),
        ("kda", "cuda", "mosaic_gpu"),
        ("gdn", "tpu", "tpu_custom_call"),
    ],
)
def test_the_programs_of_a_platform_hold_its_kernels(name, platform, kernel):
    """Traced on a CPU: the platform is the one for which the program is lowered."""
    row = mixer(name)
    inputs = draw_inputs(row, 100, dtype=jnp.bfloat16, key=64, value=64)

    def loss(*inputs):
        return jnp.sum(row.function(*inputs, implementation="pallas")[0].astype(jnp.float32))

    traced = jax.jit(jax.grad(loss, argnums=range(len(inputs)))).trace(*inputs)
    assert kernel in traced.lower(lowering_platforms=(platform,)).as_text()


def test_a_step_on_a_gpu_is_refused_with_the_form_that_is_faster():
    row = mixer("gdn")
    token = [x[:, 0] for x in draw_inputs(row, 1)]
    state = row.empty_state(2, 2, 16, 8, 1, jnp.float32)
    step = jax.jit(partial(row.step, implementation="pallas")).trace(*token, state)
    with pytest.raises(ValueError, match=r'XLA is faster: use implementation="xla"'):
        step.lower(lowering_platforms=("cuda",))


def test_an_old_jax_is_told_what_the_kernels_of_a_gpu_need():
    with pytest.raises(NotImplementedError, match=r"The kernels need jax >= 99\.0; this is"):
        require_jax("99.0", "The kernels")


def test_without_a_device_or_a_kernel_it_is_refused():
    row = mixer("gdn")
    inputs = draw_inputs(row, 3)
    state = row.empty_state(2, 2, 16, 8, 3, jnp.float32)
    for call in (
        lambda: row.function(*inputs, implementation="pallas"),
        lambda: jax.grad(lambda *x: row.function(*x, implementation="pallas")[0].sum())(*inputs),
        lambda: row.step(*(x[:, 0] for x in inputs), state, implementation="pallas"),
    ):
        with pytest.raises(ValueError, match=r"needs a TPU .* the program is for cpu"):
            call()
    with pytest.raises(ValueError, match="no kernel for this mixer"):
        mixer("rwkv7").function(*draw_inputs(mixer("rwkv7"), 3), implementation="pallas")


def test_kernels_warn_until_a_record_of_their_platform_is_cited():
    row = mixer("gdn")
    inputs = draw_inputs(row, 37)  # a time of its own, as a program warns when it is traced
    with pytest.warns(UserWarning, match='"pallas" is experimental: .*"recurrent" kernels'):
        jax.eval_shape(partial(row.function, implementation="pallas"), *inputs)
    (cited,) = (row for row in best_known.BEST_KNOWN if row[:2] == ("recurrent", "cuda"))
    cited = cited._replace(platform="cpu")
    with warnings.catch_warnings(action="error"):
        best_known.warn_experimental("recurrent", [cited])
    for other in (cited._replace(platform="tpu"), cited._replace(implementation="xla")):
        with pytest.warns(UserWarning, match="experimental"):
            best_known.warn_experimental("recurrent", [other])
