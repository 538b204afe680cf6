r"""Linear attention without a gate: a state that adds every token up and forgets nothing.

This is softmax attention with q . k instead of exp(q . k), and without the division. A feature map
is applied to q and k beforehand.
"""

from functools import partial

import jax.numpy as jnp

import toolkit.attention._shapes as shapes
from toolkit._checks import checked
from toolkit.attention.costs import additive_step_flops
from toolkit.attention.execution.compiled import compiled
from toolkit.attention.inputs import K, Q, V, recurrent
from toolkit.attention.linear.engine.recurrence import run, scan_tokens, step
from toolkit.attention.linear.engine.rule import ADDITIVE_RULE
from toolkit.attention.linear.engine.tokens import gather_tokens


@checked
@compiled
def linear_attention(
    q: shapes.Queries, k: shapes.Keys, v: shapes.Values, *,
    scale: float | None = None,
    initial_state: shapes.State | None = None, segment_ids: shapes.SegmentIds | None = None,
    implementation: shapes.Form | None = None, chunk: shapes.Chunk | None = None,
) -> shapes.Outputs:  # fmt: skip
    r"""Mix tokens through the plain sum of their keys and values.

        S_t = S_(t-1) + k_t v_t^T,   o_t = scale S_t^T q_t

    Args:
        q: [batch, time, heads, key] queries.
        k: [batch, time, heads, key] keys.
        v: [batch, time, value_heads, value]; value_heads is a multiple of heads, and every
            head of q and k serves a group of consecutive value heads.
        scale: multiplies the outputs; key**-0.5 if None.
        initial_state: [batch, value_heads, key, value] before the first token; zero if None.
        segment_ids: [batch, time] document of each token. The state is cleared wherever the
            number changes. What is not finite shows from its token on, in its own document.
            `initial_state` belongs to the first document, the final state to the last.
        implementation: "xla" (chunks; None picks it), "scan" (token by token) or "pallas"
            (kernels for Hopper GPUs, and experimental ones for TPUs).
        chunk: tokens per chunk of "xla", a power of two from 16 on; None chooses.

    Returns:
        Outputs [batch, time, value_heads, value] in the dtype of v, and the final state
        [batch, value_heads, key, value], float32 (float64 for float64 inputs).
        Both have gradients.

    Cost:
        With chunks of C = 32 tokens (64 if a head exceeds 64), 2 (2 K V + C K + C V) FLOPs
        per token and value head forward, about 2.5 times as much more backward. Reads q, k, v once.

    Source:
        Katharopoulos, Vyas, Pappas, Fleuret, "Transformers are RNNs" (arXiv:2006.16236),
        equations 16 to 20 without the normaliser.

    Example:
        >>> q = k = v = jnp.ones((1, 3, 2, 4))
        >>> out, state = linear_attention(q, k, v)
        >>> out.shape, state.shape
        ((1, 3, 2, 4), (1, 2, 4, 4))
    """
    tokens = gather_tokens(q, k, v, g=None, scale=scale)
    return run(ADDITIVE_RULE, tokens, initial_state, segment_ids, implementation, chunk)


@checked
def linear_attention_reference(
    q: shapes.Queries, k: shapes.Keys, v: shapes.Values, *,
    scale: float | None = None,
    initial_state: shapes.State | None = None, segment_ids: shapes.SegmentIds | None = None,
) -> shapes.Outputs:  # fmt: skip
    """The equation token by token: a slow oracle. Arguments as `linear_attention`."""

    def token(S, q, k, v):
        S = S + jnp.outer(k, v)
        return S, S.T @ q

    return scan_tokens(token, initial_state, segment_ids, scale, q=q, k=k, v=v)


@checked
@compiled
def linear_attention_step(
    q_t: shapes.Query, k_t: shapes.Key, v_t: shapes.Value, state: shapes.State, *,
    scale: float | None = None, implementation: shapes.StepForm | None = None,
) -> shapes.Output:  # fmt: skip
    r"""Decode one token: one read and one write of the state.

        o = scale (S^T q + (q . k) v),   S <- S + k v^T

    Arguments as `linear_attention`, without the time axis; `state` as it returns it.
    `implementation` is "xla" (None picks it) or "pallas", the experimental decode
    kernel of TPUs and Hopper GPUs.

    Cost:
        About 4 K V FLOPs and 8 K V bytes of a float32 state per value head: bound by memory. Donate
        the state under `jax.jit` so that it is updated in place.

    Example:
        >>> q = k = v = jnp.ones((1, 2, 4))
        >>> out, state = linear_attention_step(q, k, v, jnp.zeros((1, 2, 4, 4)))
        >>> out.shape, state.shape
        ((1, 2, 4), (1, 2, 4, 4))
    """
    tokens = gather_tokens(q_t, k_t, v_t, g=None, scale=scale)
    return step(ADDITIVE_RULE, tokens, state, implementation)


ROW = recurrent(
    name="linear", title="Linear attention",
    paper="Katharopoulos, Vyas, Pappas, Fleuret, Transformers are RNNs (arXiv:2006.16236)",
    transition="diagonal",
    inputs=(Q, K, V),
    function=linear_attention, step=linear_attention_step, reference=linear_attention_reference,
    step_flops=partial(additive_step_flops, decays=False),
)  # fmt: skip
