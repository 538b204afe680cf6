r"""Gated DeltaNet: a linear-time mixer whose state forgets (g) and corrects itself (beta).

The state S [key, value] is an associative memory. Each token first lets it decay, then replaces
what the memory holds under its key by its own value, to the fraction beta:

    S  <- e^g S
    S  <- S + beta k (v - S^T k)^T
    o   = scale S^T q

beta = 1 with a unit key overwrites; beta = 2 reflects (a negative eigenvalue), with which a state
can follow permutations. One mathematics in four forms: `gated_delta_net_reference` is the
equation above; `gated_delta_net` runs chunks ("xla", `engine/chunked.py`) or tokens ("scan");
`gated_delta_net_step` decodes one token. Keys must be of unit length: `normalize_qk` makes them so.
"""

import jax.numpy as jnp

import toolkit.attention._shapes as shapes
from toolkit._checks import checked
from toolkit.attention.execution.compiled import compiled
from toolkit.attention.inputs import BETA, G, K, Q, V, recurrent
from toolkit.attention.linear.engine.recurrence import run, scan_tokens, step
from toolkit.attention.linear.engine.rule import DELTA_RULE
from toolkit.attention.linear.engine.tokens import gather_tokens


@checked
@compiled
def gated_delta_net(
    q: shapes.Queries, k: shapes.Keys, v: shapes.Values, g: shapes.LogDecays,
    beta: shapes.Strengths, *,
    scale: float | None = None, normalize_qk: bool = False,
    initial_state: shapes.State | None = None, segment_ids: shapes.SegmentIds | None = None,
    implementation: shapes.Form | None = None, chunk: shapes.Chunk | None = None,
) -> shapes.Outputs:  # fmt: skip
    r"""Mix tokens through a decaying, self-correcting state, in time linear in the sequence.

        S_t = e^(g_t) S_(t-1) + beta_t k_t (v_t - e^(g_t) S_(t-1)^T k_t)^T,   o_t = scale S_t^T q_t

    Gates, states and the chunk inverse are float32 (float64 for float64 inputs).

    Args:
        q: [batch, time, heads, key] queries, of unit length or nearly so.
        k: [batch, time, heads, key] keys, of unit length or nearly so.
        v: [batch, time, value_heads, value]; value_heads is a multiple of heads, and every
            head of q and k serves a group of consecutive value heads.
        g: [batch, time, value_heads] log-decay (natural), <= 0, else NaN; -inf clears the state.
        beta: [batch, time, value_heads] writing strength in [0, 2].
        scale: multiplies the outputs; key**-0.5 if None.
        normalize_qk: bring queries and keys to unit length first (`unit_length`).
        initial_state: [batch, value_heads, key, value] before the first token; zero if None.
        segment_ids: [batch, time] document of each token. The state is cleared wherever the
            number changes. What is not finite shows from its token on, in its own document.
            `initial_state` belongs to the first document, the final state to the last.
        implementation: "xla" (chunks; None picks it), "scan" (token by token: as fast forward
            for small heads on a CPU, but its gradient keeps one state per token) or "pallas"
            (kernels for Hopper GPUs, and experimental ones for TPUs).
        chunk: tokens per chunk of "xla", a power of two from 16 on; None chooses.

    Returns:
        Outputs [batch, time, value_heads, value] in the dtype of v, and the final state
        [batch, value_heads, key, value]. Both have gradients.

    Cost:
        With chunks of C = 16 tokens (32 if a head exceeds 64, or beyond 4096 tokens, unless
        values alone are wanted on a CPU), 2 (3 K V + 2 C K + 2 C V) FLOPs and a little per token
        and value head forward, about 2.2 times as much more backward. Reads q, k, v once.

    Source:
        Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule"
        (arXiv:2412.06464), equation 10 and section 3.3.

    Example:
        >>> q = k = v = jnp.full((1, 3, 2, 4), 0.5)
        >>> g, beta = -jnp.ones((1, 3, 2)), jnp.ones((1, 3, 2))
        >>> out, state = gated_delta_net(q, k, v, g, beta)
        >>> out.shape, state.shape
        ((1, 3, 2, 4), (1, 2, 4, 4))
    """
    tokens = gather_tokens(q, k, v, beta, g=g, scale=scale, normalize_qk=normalize_qk)
    return run(DELTA_RULE, tokens, initial_state, segment_ids, implementation, chunk)


@checked
def gated_delta_net_reference(
    q: shapes.Queries, k: shapes.Keys, v: shapes.Values, g: shapes.LogDecays,
    beta: shapes.Strengths, *,
    scale: float | None = None, normalize_qk: bool = False,
    initial_state: shapes.State | None = None, segment_ids: shapes.SegmentIds | None = None,
) -> shapes.Outputs:  # fmt: skip
    """The equation token by token: a slow oracle. Arguments as `gated_delta_net`."""

    def token(S, q, k, v, g, beta):
        S = jnp.exp(g) * S
        S = S + beta * jnp.outer(k, v - S.T @ k)
        return S, S.T @ q

    arrays = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    return scan_tokens(token, initial_state, segment_ids, scale, normalize_qk, **arrays)


@checked
@compiled
def gated_delta_net_step(
    q_t: shapes.Query, k_t: shapes.Key, v_t: shapes.Value, g_t: shapes.LogDecay,
    beta_t: shapes.Strength, state: shapes.State, *,
    scale: float | None = None, normalize_qk: bool = False,
    implementation: shapes.StepForm | None = None,
) -> shapes.Output:  # fmt: skip
    r"""Decode one token: one read and one write of the state.

        p = S^T k,  r = S^T q,  u = beta (v - e^g p),
        o = scale (e^g r + (q . k) u),  S <- e^g S + k u^T

    Arguments as `gated_delta_net`, without the time axis; `state` as it returns it.
    `implementation` is "xla" (None picks it) or "pallas", the experimental decode
    kernel of TPUs and Hopper GPUs.

    Cost:
        About 7 K V FLOPs and 8 K V bytes of a float32 state per value head: bound by memory. Donate
        the state under `jax.jit` so that it is updated in place.

    Example:
        >>> q = k = v = jnp.full((1, 2, 4), 0.5)
        >>> state = jnp.zeros((1, 2, 4, 4))
        >>> out, state = gated_delta_net_step(q, k, v, -q[..., 0], q[..., 0], state)
        >>> out.shape, state.shape
        ((1, 2, 4), (1, 2, 4, 4))
    """
    tokens = gather_tokens(q_t, k_t, v_t, beta_t, g=g_t, scale=scale, normalize_qk=normalize_qk)
    return step(DELTA_RULE, tokens, state, implementation)


ROW = recurrent(
    name="gdn", title="Gated DeltaNet",
    paper="Yang, Kautz, Hatamizadeh, Gated Delta Networks (arXiv:2412.06464)",
    inputs=(Q, K, V, G, BETA),
    function=gated_delta_net, step=gated_delta_net_step, reference=gated_delta_net_reference,
)  # fmt: skip
