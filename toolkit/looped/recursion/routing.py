"""Loops that each token takes as often as a router says.

A loop mixes the tokens that take it among themselves: its caches hold no others. Tokens that do not
take it keep their state. They are sorted behind the others, where causality hides them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from toolkit._pytrees import register_dataclass
from toolkit.attention import KVCache
from toolkit.attention.execution.precision import accumulator
from toolkit.looped.feed_forward import MIXTURES
from toolkit.looped.mixing.unwritten import UnwrittenCache, written

WORDS = ("full", "nope")
"""Layers whose caches may lack tokens; a state or a window of places cannot leave one out."""

EXPERT_SCALE = 0.1
"""Factor of the weights of "expert" routers (the paper's alpha; 1 for "token")."""

OTHERS = (
    "residual_gate", "input_injection", "random_start", "norm_every_loop", "exit_gate",
    "message_rank", "windows",
)  # fmt: skip
"""Switches of loops that all tokens take alike."""


@register_dataclass
@dataclasses.dataclass(frozen=True)
class Recursing:
    """What a loop hands to the next."""

    h: Float[Array, "... width"]  # the tokens' states [..., width]
    active: Bool[Array, "..."]  # whether a token has taken all loops so far
    count: Int[Array, "..."]  # loops that it took
    loop: Int[Array, ""]  # the number of the next loop, from 0
    base: Any = None  # tokens of each row [batch] that came before these, or None
    # with "token", the states before the first loop [..., width]; None with "expert"
    start: Any = None
    depth: Any = None  # likewise the last loop that a token takes [...], from 0
    weight: Any = None  # likewise the share of its last loop's output [...]


class Router(nnx.Module):
    """The routers of a model: a score per loop.

        "expert"   in loop r, from the second on, token t goes on if  sigmoid(theta_r . h_t) > 1/2
                   h_t <- h_t + 0.1 sigmoid(theta_r . h_t) F(h)_t
        "token"    p = softmax(h_t theta) before the first loop; token t takes i = argmax p loops
                   h_t <- F(h)_t, and in its last loop  h_t <- start_t + p_i F(h)_t

    Both are causal. With "expert", training lets every loop choose its best tokens instead, of the
    whole sequence; see `recursion_loss`.

    Attributes:
        kernel: theta [width, loops].

    Source: Bae et al., "Mixture-of-Recursions", 2025, arXiv:2507.10524, section 2.2: a linear
        router, sigmoid with the auxiliary loss, or softmax with the balancing loss.
    """

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        draw = nnx.initializers.normal(config.width**-0.5)
        self.kernel = nnx.Param(draw(rngs.params(), (config.width, config.loops)))
        self.kind, self.loops = config.recursion, config.loops

    def logits(self, h: Float[Array, "... width"]) -> Float[Array, "... loops"]:
        """h theta, in at least float32."""
        wide = accumulator(h.dtype)
        return h.astype(wide) @ self.kernel[...].astype(wide)

    def start(
        self, h: Float[Array, "... width"], base: Int[Array, "batch"] | None = None
    ) -> Recursing:
        """What the first loop is given."""
        leading = h.shape[:-1]
        every, none = jnp.ones(leading, bool), jnp.zeros(leading, jnp.int32)
        first = Recursing(h, every, none, jnp.zeros((), jnp.int32), base)
        if self.kind == "expert":
            return first
        shares = jax.nn.softmax(self.logits(h), axis=-1)
        depth, weight = jnp.argmax(shares, axis=-1), jnp.max(shares, axis=-1)
        return dataclasses.replace(first, start=h, depth=depth.astype(jnp.int32), weight=weight)

    def taking(self, state: Recursing) -> tuple[Bool[Array, "..."], Float[Array, "..."] | None]:
        """Which tokens take the next loop, and with "expert" their scores in it."""
        if self.kind == "token":
            return state.active & (state.depth >= state.loop), None
        scores = jax.nn.sigmoid(jnp.take(self.logits(state.h), state.loop, axis=-1))
        return state.active & ((scores > 0.5) | (state.loop == 0)), scores

    def after(
        self, state: Recursing, out: Float[Array, "... width"], takes: Array, scores: Any
    ) -> Recursing:
        """What the next loop is given, after a loop of this output."""
        h = state.h
        if self.kind == "expert":
            new = h + (EXPERT_SCALE * scores[..., None] * out).astype(h.dtype)
        else:
            ended = state.start + (state.weight[..., None] * out).astype(h.dtype)
            new = jnp.where((state.depth == state.loop)[..., None], ended, out)
        return dataclasses.replace(
            state,
            h=jnp.where(takes[..., None], new, h),
            active=takes,
            count=state.count + takes,
            loop=state.loop + 1,
        )


def recursive_loop(
    router: Router, run: Callable[..., tuple[Array, Any]], state: Recursing, *,
    segment_ids: Int[Array, "batch time"] | None, caches: tuple[Any, ...] | None,
) -> tuple[Recursing, tuple[Any, ...] | None]:  # fmt: skip
    """One loop over the tokens that take it; `run` is `run_blocks` on the loop's layers.

    With caches, documents other than a row's last are padding, and stay outside of all loops.
    """
    takes, scores = router.taking(state)
    if caches is not None and not all(isinstance(cache, KVCache) for cache in caches):
        raise ValueError("recursion: loops leave tokens out; wanted caches of keys and values.")
    if state.h.ndim == 2:
        out, caches = _step(run, state, takes, caches)
        return router.after(state, out, takes, scores), caches
    real = jnp.ones_like(takes)
    if caches is not None and segment_ids is not None:
        real = segment_ids == segment_ids[:, -1:]
        segment_ids = None
    takes &= real
    places = jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1
    places = places if state.base is None else places + state.base[:, None]
    # The sort is stable: tokens stay in their order.
    order = jnp.argsort(~takes, axis=1, stable=True)
    sort = lambda x: jnp.take_along_axis(x, order, axis=1)  # noqa: E731
    if segment_ids is not None:
        segment_ids = sort(jnp.where(takes, segment_ids, jnp.iinfo(segment_ids.dtype).max))
    h = jnp.take_along_axis(state.h, order[..., None], axis=1)
    how = {"segment_ids": segment_ids, "positions": sort(places), "caches": caches}
    out, found = run(h, **how)
    out = jnp.take_along_axis(out, jnp.argsort(order, axis=1)[..., None], axis=1)
    if caches is not None:
        found = _counted(caches, found, takes.sum(axis=1, dtype=jnp.int32))
    return router.after(state, out, takes, scores), found


def _counted(before: Any, after: Any, new: Int[Array, "batch"]) -> tuple[KVCache, ...]:
    """Caches of which the first `new` tokens of those written count."""
    pairs = zip(before, after, strict=True)
    return tuple(dataclasses.replace(a, length=b.length + new) for b, a in pairs)


@register_dataclass
@dataclasses.dataclass(frozen=True)
class PlacedCache(UnwrittenCache):
    """An `UnwrittenCache` that lacks tokens, with the place of the next in the whole sequence."""

    place: Int[Array, "batch"]

    @property
    def length(self) -> Array:
        return self.place


def _step(run: Any, state: Recursing, takes: Array, caches: Any) -> tuple[Array, Any]:
    """A loop of one token per row, left out if no row takes it."""
    placed = tuple(PlacedCache(cache, state.base) for cache in caches)

    def taken() -> Any:
        return run(state.h, caches=placed)

    out, made = jax.lax.cond(
        takes.any(),
        taken,
        lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(taken)),
    )
    filled = tuple(written(c, token, is_ring=False) for c, token in zip(caches, made, strict=True))
    return out, _counted(caches, filled, takes.astype(jnp.int32))


def check_recursion(config: Any) -> None:
    """Refuse switches that do not go with a number of loops per token."""
    if config.recursion is None:
        return
    if config.recursion not in ("expert", "token"):
        raise ValueError(f'recursion is {config.recursion!r}; want "expert", "token" or None.')
    for name in OTHERS:
        if getattr(config, name):
            raise ValueError(f"{name} and recursion exclude each other; turn one of them off.")
    if other := sorted({*config.layers} - {*WORDS}):
        raise ValueError(
            f"recursion: the state of {other[0]!r} layers cannot leave tokens out; want looped "
            f"layers out of {', '.join(WORDS)}."
        )
    if MIXTURES & {*config.feed_forward_words}:
        raise ValueError(
            "recursion: routers of experts would count tokens that a loop leaves out; want "
            'feed_forwards without "moe" and "hash_moe".'
        )
    if any(getattr(config, word).quantised_cache for word in {*config.layers}):
        raise ValueError(
            "recursion: a quantised cache takes its factors from the first tokens written, whether "
            "they count or not; want quantised_cache=False."
        )
