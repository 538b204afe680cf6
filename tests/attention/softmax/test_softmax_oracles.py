"""Softmax attention's arguments against those of others: jax.nn, and the layers of transformers."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from toolkit.attention import softmax_attention

TOLERANCE = 2e-5
BATCH, TIME, KEYS, HEADS, KEY_HEADS, SIZE = 2, 33, 40, 4, 2, 8
FORMS = ("dense", "blockwise")
rng = np.random.default_rng(0)
Q, K, V = (
    rng.standard_normal((BATCH, time, heads, SIZE)).astype(np.float32)
    for time, heads in ((TIME, HEADS), (KEYS, KEY_HEADS), (KEYS, KEY_HEADS))
)
BIAS = rng.standard_normal((1, HEADS, TIME, KEYS)).astype(np.float32)
MASK = rng.random((BATCH, 1, TIME, KEYS)) > 0.2
MASK[..., 0] = True  # where nothing is seen jax.nn gives a mean of all values, we give 0

CASES = {
    "cross": {},
    "causal, more keys than queries": {"is_causal": True},
    "bias and mask": {"bias": BIAS, "mask": MASK},
    "lengths": {
        "query_seq_lengths": np.array([TIME, 9], np.int32),
        "key_value_seq_lengths": np.array([17, KEYS], np.int32),
    },
    "window": {"local_window_size": (5, 3), "scale": 0.7},
    "causal window": {"local_window_size": 4, "is_causal": True},
}


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_jax_nn(case):
    form = FORMS[list(CASES).index(case) % 2]  # each against the equation elsewhere
    options = {"is_causal": False} | CASES[case]

    def ours(q, k, v):
        return softmax_attention(q, k, v, **options, implementation=form, return_residual=True)[::2]

    def theirs(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, **options, return_residual=True)

    def loss(out):
        return jnp.sum(out[0] * jnp.cos(jnp.arange(out[0].size)).reshape(out[0].shape))

    def value_and_gradient(function):
        run = jax.value_and_grad(
            lambda *qkv: (loss(found := function(*qkv)), found), argnums=(0, 1, 2), has_aux=True
        )
        return jax.jit(run)(Q, K, V)

    (_, (out, residual)), gradients = value_and_gradient(ours)
    (_, (their_out, their_residual)), their_gradients = value_and_gradient(theirs)
    seen = jnp.isfinite(residual)  # theirs is a large negative number
    pairs = [(out, their_out), (jnp.where(seen, residual, 0), jnp.where(seen, their_residual, 0))]
    for got, wanted in [*pairs, *zip(gradients, their_gradients, strict=True)]:
        np.testing.assert_allclose(got, wanted, atol=TOLERANCE, rtol=0)


def causal(torch):
    return torch.full((TIME, TIME), -np.inf).triu(1)


def layers(torch):
    """Attention of gemma-2, gpt-oss and BLOOM: what they compute, and our arguments for it."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss

    sinks = np.linspace(-1, 2, HEADS, dtype=np.float32)
    module = SimpleNamespace(
        num_key_value_groups=HEADS // KEY_HEADS, training=False, sinks=torch.from_numpy(sinks)
    )
    ones = torch.ones((BATCH, TIME))
    alibi = build_alibi_tensor(ones, HEADS, torch.float32).reshape(BATCH, HEADS, 1, TIME)
    slopes = (alibi[0, :, 0, 1] - alibi[0, :, 0, 0]).numpy()
    scaling, cap = 0.6, 2.0
    return {
        "gemma-2": (
            lambda q, k, v: gemma2(module, q, k, v, causal(torch), 0.0, scaling, cap)[0],
            {"logits_soft_cap": cap},
        ),
        "gpt-oss": (
            lambda q, k, v: gpt_oss(module, q, k, v, causal(torch), scaling)[0],
            {"sinks": jnp.asarray(sinks)},
        ),
        "BLOOM": (
            lambda q, k, v: gemma2(module, q, k, v, alibi + causal(torch), 0.0, scaling)[0],
            {"alibi_slopes": jnp.asarray(slopes)},
        ),
    }


@pytest.mark.oracle
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["gemma-2", "gpt-oss", "BLOOM"])
def test_agrees_with_layers_of_transformers(name):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    theirs, arguments = layers(torch)[name]
    inputs = [np.array(x[:, :TIME]) for x in (Q, K, V)]
    tensors = [torch.from_numpy(x).transpose(1, 2).requires_grad_() for x in inputs]
    wanted = theirs(*tensors)
    wanted.square().sum().backward()
    for form in FORMS:

        def attend(q, k, v, form=form):
            out, _ = softmax_attention(q, k, v, scale=0.6, implementation=form, **arguments)
            return jnp.sum(out**2), out

        run = jax.jit(jax.grad(attend, argnums=(0, 1, 2), has_aux=True))
        gradients, out = run(*inputs)
        np.testing.assert_allclose(out, wanted.detach().numpy(), atol=TOLERANCE, rtol=0)
        for got, tensor in zip(gradients, tensors, strict=True):
            gradient = tensor.grad.transpose(1, 2).numpy()
            np.testing.assert_allclose(got, gradient, atol=TOLERANCE * 5, rtol=0)
