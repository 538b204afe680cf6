r"""Gated DeltaProduct: several delta-rule corrections per token, after one decay.

    S  <- e^g S
    S  <- S + beta_i k_i (v_i - S^T k_i)^T     for i = 1 ... n
    o   = scale S^T q

A token's transition is a product of n generalised Householder matrices I - beta_i k_i k_i^T:
with beta = 2 each is a reflection, and two of them make any rotation of a plane, which one alone
cannot. With n = 1 it is Gated DeltaNet. The corrections run as tokens of their own
through the same engine. Keys must be of unit length: `normalize_qk` makes them so.
"""

from typing import Annotated

import jax.numpy as jnp
from jaxtyping import Array, Float

import toolkit.attention._shapes as shapes
from toolkit._checks import checked
from toolkit.attention.costs import product_forward_flops, product_step_flops
from toolkit.attention.execution.compiled import compiled
from toolkit.attention.inputs import BETA, G, K, Q, V, per_step, recurrent
from toolkit.attention.linear.engine.recurrence import run, scan_tokens, step
from toolkit.attention.linear.engine.rule import DELTA_RULE
from toolkit.attention.linear.engine.tokens import gather_tokens
from toolkit.attention.linear.gates import unit_length

# The arrays of several corrections per token: of a sequence, and of one token.
StepKeys = Annotated[Float[Array, "batch time heads steps key"], shapes.TOKENS]
StepValues = Annotated[
    Float[Array, "batch time value_heads steps value"], shapes.TOKENS, shapes.GROUPED_VALUES
]
StepStrengths = Annotated[Float[Array, "batch time value_heads steps"], shapes.STRENGTH]
StepKey = Annotated[Float[Array, "batch heads steps key"], shapes.TOKENS]
StepValue = Annotated[
    Float[Array, "batch value_heads steps value"], shapes.TOKENS, shapes.GROUPED_VALUES
]
StepStrength = Annotated[Float[Array, "batch value_heads steps"], shapes.STRENGTH]


@checked
@compiled
def gated_delta_product(
    q: shapes.Queries, k: StepKeys, v: StepValues, g: shapes.LogDecays, beta: StepStrengths, *,
    scale: float | None = None, normalize_qk: bool = False,
    initial_state: shapes.State | None = None, segment_ids: shapes.SegmentIds | None = None,
    implementation: shapes.Form | None = None, chunk: shapes.Chunk | None = None,
) -> shapes.Outputs:  # fmt: skip
    r"""Mix tokens through a state that every token corrects several times, in linear time.

        S_t^0 = e^(g_t) S_(t-1),   S_t^i = S_t^(i-1) + beta_ti k_ti (v_ti - S_t^(i-1)^T k_ti)^T
        o_t = scale (S_t^n)^T q_t

    Arguments and results as `gated_delta_net`, except:

    Args:
        k: [batch, time, heads, steps, key] keys of the corrections, of unit length or nearly so.
        v: [batch, time, value_heads, steps, value]; value_heads is a multiple of heads.
        g: [batch, time, value_heads] log-decay (natural), <= 0, else NaN, before the
            first correction.
        beta: [batch, time, value_heads, steps] writing strength in [0, 2].

    Cost:
        That of `gated_delta_net` on steps x time tokens, queries of zero included.

    Source:
        Siems, Carstensen, Zela, Hutter, Pontil, Grazzi, "DeltaProduct: Improving
        State-Tracking in Linear RNNs via Householder Products" (arXiv:2502.10297), section 3.

    Example:
        >>> q, g = jnp.ones((1, 3, 2, 4)), -jnp.ones((1, 3, 2))
        >>> k = v = jnp.full((1, 3, 2, 2, 4), 0.5)
        >>> out, state = gated_delta_product(q, k, v, g, beta=k[..., 0])
        >>> out.shape, state.shape
        ((1, 3, 2, 4), (1, 2, 4, 4))
    """
    if normalize_qk:
        q, k = unit_length(q), unit_length(k)
    steps = k.shape[3]
    q, k, v, g, beta = _as_tokens(q, k, v, g, beta)
    tokens = gather_tokens(q, k, v, beta, g=g, scale=scale)
    if segment_ids is not None:
        segment_ids = jnp.repeat(segment_ids, steps, axis=1)
    out, state = run(DELTA_RULE, tokens, initial_state, segment_ids, implementation, chunk)
    return out[:, steps - 1 :: steps], state


@checked
def gated_delta_product_reference(
    q: shapes.Queries, k: StepKeys, v: StepValues, g: shapes.LogDecays, beta: StepStrengths, *,
    scale: float | None = None, normalize_qk: bool = False,
    initial_state: shapes.State | None = None, segment_ids: shapes.SegmentIds | None = None,
) -> shapes.Outputs:  # fmt: skip
    """The equation token by token: a slow oracle. Arguments as `gated_delta_product`."""

    def token(S, q, k, v, g, beta):
        S = jnp.exp(g) * S
        for k_i, v_i, beta_i in zip(k, v, beta, strict=True):
            S = S + beta_i * jnp.outer(k_i, v_i - S.T @ k_i)
        return S, S.T @ q

    arrays = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    return scan_tokens(token, initial_state, segment_ids, scale, normalize_qk, **arrays)


@checked
@compiled
def gated_delta_product_step(
    q_t: shapes.Query, k_t: StepKey, v_t: StepValue, g_t: shapes.LogDecay, beta_t: StepStrength,
    state: shapes.State, *,
    scale: float | None = None, normalize_qk: bool = False,
    implementation: shapes.StepForm | None = None,
) -> shapes.Output:  # fmt: skip
    r"""Decode one token: one read and one write of the state.

        u_i = beta_i (v_i - e^g S^T k_i - sum_(j<i) (k_i . k_j) u_j)    for i = 1 ... n
        o   = scale (e^g S^T q + sum_i (q . k_i) u_i),   S <- e^g S + sum_i k_i u_i^T

    Arguments as `gated_delta_product`, without the time axis; state and implementation as
    `gated_delta_net_step`, where "pallas" reads and writes the state once per correction.

    Cost:
        About (4 n + 3) K V FLOPs and 8 K V bytes of a float32 state per value head.

    Example:
        >>> q, g, state = jnp.ones((1, 2, 4)), -jnp.ones((1, 2)), jnp.zeros((1, 2, 4, 4))
        >>> k = v = jnp.full((1, 2, 2, 4), 0.5)
        >>> gated_delta_product_step(q, k, v, g, k[..., 0], state)[0].shape
        (1, 2, 4)
    """
    if normalize_qk:
        q_t, k_t = unit_length(q_t), unit_length(k_t)
    token, *again = (
        gather_tokens(
            q_t, k_t[:, :, i], v_t[:, :, i], beta_t[:, :, i], g=None if i else g_t, scale=scale
        )
        for i in range(k_t.shape[2])
    )
    return step(DELTA_RULE, token, state, implementation, again=again)


def _as_tokens(q, k, v, g, beta) -> tuple[Array, ...]:
    """Every correction a token: the decay is the first one's, the query the last one's."""
    steps = k.shape[3]

    def spread(x: Array, place: int) -> Array:
        """[batch, time, ...] -> [batch, time * steps, ...], zero except in one place per token."""
        widths = [(0, 0), (0, 0), (place, steps - 1 - place)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x[:, :, None], widths)
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    def in_time(x: Array) -> Array:
        """[batch, time, heads, steps, ...] -> [batch, time * steps, heads, ...]."""
        x = jnp.moveaxis(x, 3, 2)
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    return spread(q, steps - 1), in_time(k), in_time(v), spread(g, 0), in_time(beta)


ROW = recurrent(
    name="delta_product", title="Gated DeltaProduct",
    paper="Siems et al., DeltaProduct (arXiv:2502.10297)",
    inputs=(Q, per_step(K), per_step(V), G, per_step(BETA)),
    function=gated_delta_product, step=gated_delta_product_step,
    reference=gated_delta_product_reference,
    forward_flops=product_forward_flops, step_flops=product_step_flops,
)  # fmt: skip
