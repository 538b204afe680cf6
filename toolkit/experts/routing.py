"""The choice of experts for every token, and their weights."""

import functools
import math
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from toolkit._annotations import AtLeast, Between
from toolkit._checks import check_shape, checked
from toolkit.attention.execution.precision import accumulator, precise_einsum

_TINY = 1e-20  # as DeepSeek-V3's code has it


Scores = Literal["softmax", "sigmoid", "sqrtsoftplus"]


def _sqrt_softplus(z):
    # The root of a number that rounds to 0 has no finite derivative.
    return jnp.sqrt(jnp.maximum(jax.nn.softplus(z), jnp.finfo(z.dtype).tiny))


SCORES = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid, "sqrtsoftplus": _sqrt_softplus}


class Routing(NamedTuple):
    """A router's decisions, a pytree.

    Attributes:
        weights: [..., chosen], float32: factors of the chosen experts' outputs.
        experts: [..., chosen], int32: the chosen experts, largest score first.
        probabilities: [..., experts], float32: sum to 1; used by the losses.
        log_normaliser: [...], float32: log sum exp of the logits, for the z-loss.

    Example:
        >>> route(jnp.ones((3, 8)), 2).weights.shape
        (3, 2)
    """

    weights: Float[Array, "*tokens chosen"]
    experts: Int[Array, "*tokens chosen"]
    probabilities: Float[Array, "*tokens experts"]
    log_normaliser: Float[Array, "*tokens"]


@checked
def router_logits(
    x: Float[Array, "*tokens width"],
    kernel: Float[Array, "width experts"],
    bias: Float[Array, "experts"] | None = None,
) -> Float[Array, "*tokens experts"]:
    """The logits of a router, in float32 for tokens of any dtype.

        z = x W + b

    Logits of 256 experts, rounded to bfloat16, send one token in twenty-five to others.

    Args:
        x: tokens [..., width].
        kernel: W [width, experts].
        bias: b [experts], or None.

    Returns:
        z [..., experts], float32, or float64 for float64 tokens.

    Cost: 2 width experts FLOPs per token.

    Source: Fedus, Zoph, Shazeer, "Switch Transformers", 2021, arXiv:2101.03961, section 2.4
        (selective precision).

    Example:
        >>> router_logits(jnp.ones((3, 4), jnp.bfloat16), jnp.ones((4, 2))).dtype
        dtype('float32')
    """
    if x.shape[-1] != kernel.shape[0]:
        raise ValueError(f"kernel must have {x.shape[-1]} rows, as x has width; got {kernel.shape}")
    return _logits(x, kernel, bias)


@jax.jit
def _logits(x, kernel, bias):
    wide = accumulator(x.dtype)
    logits = precise_einsum("...d,de->...e", x.astype(wide), kernel.astype(wide))
    return logits if bias is None else logits + bias.astype(wide)


@checked
def route(
    logits: Annotated[
        Float[Array, "*tokens experts"], Between("a number per expert", -math.inf, math.inf)
    ],
    count: Annotated[int, AtLeast(1)],
    *,
    scores: Scores = "softmax",
    choice_bias: Float[Array, "experts"] | None = None,
    groups: Annotated[int, AtLeast(1)] = 1,
    chosen_groups: Annotated[int, AtLeast(1)] = 1,
    group_score: Literal["top2", "max"] = "top2",
    normalise: bool = True,
    scale: float = 1.0,
    experts: Int[Array, "*tokens chosen"] | None = None,
) -> Routing:
    """Choose experts for every token.

        s = softmax(z), sigmoid(z) or sqrt(log(1 + e^z))               per token, over all experts
        c = s + b, and -inf outside of the best groups                 what chooses
        i = the `count` largest of c;   w = scale s_i / sum_j s_j      the bias never weighs

    A group's score is the largest of its c ("max"), or the sum of its two largest ("top2"). Without
    `normalise` w is scale s_i. Of equal numbers the expert with the lower index is chosen.

    Args:
        logits: z [..., experts], from `router_logits`.
        count: experts per token, at least 2 with `normalise`: a single normalised weight is always
            1, and the router would not learn.
        scores: the function from logits to scores.
        choice_bias: b [experts], added to scores for the choice only, or None. Its gradient is 0.
        groups: number of equal groups of experts, of which a token first chooses some.
        chosen_groups: number of chosen groups.
        group_score: score of a group.
        normalise: whether the weights of a token sum to `scale`.
        scale: factor of the weights.
        experts: [..., chosen], given experts, for which only weights are computed, so that a
            trainer can follow the choices of an inference engine. An index out of range gets the
            weight NaN.

    Returns:
        The `Routing`; weights are float32, or float64 for float64 logits.

    Source: `ROUTERS` names the paper of each family that has these switches.

    Example:
        >>> routing = route(jnp.array([[1.0, 3.0, 2.0]]), 2)
        >>> routing.experts.tolist()
        [[1, 2]]
        >>> route(jnp.array([[1.0, 3.0, 2.0]]), 2, experts=jnp.array([[0, 2]])).experts.tolist()
        [[0, 2]]
    """
    check_choice(
        logits.shape[-1],
        count,
        groups=groups,
        chosen_groups=chosen_groups,
        group_score=group_score,
        normalise=normalise,
    )
    if choice_bias is not None:
        check_shape("choice_bias", choice_bias, logits.shape[-1:], "experts")
    if experts is not None:
        check_shape("experts", experts, (*logits.shape[:-1], count), "*tokens chosen")
    how = _How(count, scores, groups, chosen_groups, group_score, normalise)
    return _route(logits, choice_bias, experts, scale, how)


class _How(NamedTuple):
    """The switches of a router that affect its program."""

    count: int
    scores: str
    groups: int
    chosen_groups: int
    group_score: str
    normalise: bool


@functools.partial(jax.jit, static_argnames="how")
def _route(logits, bias, experts, scale, how) -> Routing:
    logits = logits.astype(accumulator(logits.dtype))
    is_softmax = how.scores == "softmax"
    score = SCORES[how.scores](logits)
    if experts is None:
        experts = _choose(score, bias, how)
    if is_softmax and how.normalise:  # the same, and no weight of all is rounded to 0
        weights = jax.nn.softmax(_taken(logits, experts))
    else:
        weights = _taken(score, experts)
        weights = _divided_by_sum(weights) if how.normalise else weights
    is_expert = (experts >= 0) & (experts < logits.shape[-1])
    weights = jnp.where(is_expert, scale * weights, jnp.nan)
    probabilities = score if is_softmax else _divided_by_sum(score)
    log_normaliser = jax.nn.logsumexp(logits, axis=-1)
    return Routing(weights, experts.astype(jnp.int32), probabilities, log_normaliser)


def _divided_by_sum(score):
    return score / (score.sum(-1, keepdims=True) + _TINY)


def check_choice(
    experts: int, count: int, *,
    groups: int, chosen_groups: int, group_score: str, normalise: bool, name: str = "count",
) -> None:  # fmt: skip
    """Refuse impossible numbers of experts per token or of groups."""
    if count > experts:
        raise ValueError(f"{name} must be at most the {experts} experts; got {count}")
    if experts % groups:
        nearest = max(n for n in range(1, groups + 1) if experts % n == 0)
        raise ValueError(
            f"groups must divide the {experts} experts; got {groups}, and {nearest} does"
        )
    each = experts // groups
    if chosen_groups > groups:
        raise ValueError(f"chosen_groups must be at most groups {groups}; got {chosen_groups}")
    if count > chosen_groups * each:
        raise ValueError(
            f"{name} must be at most the {chosen_groups * each} experts of {chosen_groups} chosen "
            f"groups; got {count}"
        )
    if group_score == "top2" and groups > 1 and each < 2:
        raise ValueError(
            'group_score "top2" needs two experts in a group; got 1, for which "max" is meant'
        )
    if count == 1 and normalise:
        raise ValueError(
            f"{name} 1 with normalise gives every token the weight 1, and the router no gradient; "
            "pass normalise=False"
        )


def _choose(score, bias, how):
    choice = jax.lax.stop_gradient(score if bias is None else score + bias.astype(score.dtype))
    if how.groups > 1:
        choice = choice.reshape(*choice.shape[:-1], how.groups, -1)
        best = jax.lax.top_k(choice, 2 if how.group_score == "top2" else 1)[0].sum(-1)
        chosen = jax.lax.top_k(best, how.chosen_groups)[1]
        is_chosen = (chosen[..., None] == jnp.arange(how.groups)).any(-2)
        # Not 0, as DeepSeek-V2's code has it: a score with a negative bias would lose against it.
        choice = jnp.where(is_chosen[..., None], choice, -jnp.inf).reshape(score.shape)
    return jax.lax.top_k(choice, how.count)[1]


def _taken(array, indices):
    return jnp.take_along_axis(array, indices, axis=-1, mode="clip")


@checked
def expert_loads(
    experts: Int[Array, "*tokens chosen"], count: Annotated[int, AtLeast(1)]
) -> Int[Array, "experts"]:
    """The number of (token, expert) pairs of each expert.

    Args:
        experts: [..., chosen], as in a `Routing`.
        count: number of experts.

    Returns:
        int32 [experts], whose sum is the number of pairs.

    Example:
        >>> expert_loads(jnp.array([[0, 2], [2, 1]]), 4).tolist()
        [1, 1, 2, 0]
    """
    return jnp.zeros(count, jnp.int32).at[experts.ravel()].add(1)
