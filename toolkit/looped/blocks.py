"""One physical layer: norm, mix tokens, add; norm, feed forward, add. And a stack of them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from toolkit.experts import routing_statistics
from toolkit.looped.config import LoopedConfig
from toolkit.looped.feed_forward import FEED_FORWARDS
from toolkit.looped.layers import SeparateNorms, norm_layer
from toolkit.looped.mixing import LAYERS
from toolkit.looped.mixing.in_turn import InTurn
from toolkit.looped.mixing.layer import Separate
from toolkit.looped.mixing.streaming import is_streaming, stream_block
from toolkit.looped.residual import Connections, Pass
from toolkit.looped.residual.groups import GroupResidual
from toolkit.looped.scanned import can_scan, run_scanned


class Block(nnx.Module):
    """Pre-norm transformer block around any token mixer and feed-forward layer.

        h' = h + Mixer(RMSNorm(h));   F(h) = h' + FeedForward(RMSNorm(h'))

    With `sandwich_norm` a second RMSNorm is applied to what each sub-layer adds, or with
    `norm_of_sum` to the sum, h' = Norm(h + Mixer(Norm(h))), as in Huginn. With
    `ladder_residual` each sub-layer reads the residual stream as it was before the preceding
    sub-layer:

        h' = h + Mixer(RMSNorm(b));   F(h) = h' + FeedForward(RMSNorm(h));   b of the next is h'

    so that on many devices the all-reduce of one sub-layer's output overlaps with the computation
    of the next. Without `pre_norm` a sub-layer reads the stream as it is, and with
    `parallel_residual` both read the stream before the block:

        F(h) = h + Mixer(Norm(h)) + FeedForward(Norm(h))      `shared_norm`: one norm for both

    What a sub-layer adds is multiplied by `residual_scale`, and the stream by `stream_scale`; with
    `carry_norm` it is the normed one, h' = a Norm(h) + b Mixer(Norm(h)), as in MiniMax. Where the
    word of the feed-forward layer is "none", the mixer is the only sub-layer and no norm follows
    it. With `streams` or `attention_residual`, `connections` stand in place of these additions; see
    `toolkit.looped.residual`.

    Source: LT2, architecture section; Zhu et al., "Scaling Latent Reasoning via Looped Language
        Models" (Ouro), 2025, for the second norms; Zhang et al., "Ladder-Residual", 2025,
        arXiv:2501.06589; Wang and Komatsuzaki, "GPT-J-6B", 2021, for the parallel form.
    """

    def __init__(
        self, word: str, config: LoopedConfig, *,
        rngs: nnx.Rngs, feed_forward: str = "swiglu", stack: str = "blocks",
        depth: tuple[int, int] = (0, 1),
    ):  # fmt: skip
        width, dtype = config.width, config.compute_dtype
        how: dict[str, Any] = {"depth": depth} if LAYERS[word].has_depth else {}
        self.mixer, self.is_ladder = LAYERS[word](config, rngs=rngs, **how), config.ladder_residual
        self.word, self.shares_inputs = word, self.mixer.shares_inputs
        # LT2 draws the down projection at hidden^-1/2 in softmax blocks, width^-1/2 elsewhere.
        is_softmax = self.mixer.word in ("full", "window", "nope")

        def down_std(hidden: int, width: int) -> float:
            return (hidden if is_softmax else width) ** -0.5

        self.feed_forward = FEED_FORWARDS[feed_forward](config, down_std=down_std, rngs=rngs)
        self.reads_tokens = self.mixer.reads_tokens or self.feed_forward.reads_tokens
        how = {"epsilon": config.norm_epsilon, "dtype": dtype, "rngs": rngs}

        def norm(is_wanted: bool) -> Any:
            return norm_layer(config.norm, width, **how) if is_wanted else nnx.data(None)

        self.mixer_norm = norm(config.pre_norm)
        if self.mixer.reads_separately and config.pre_norm:
            self.mixer_norm = SeparateNorms(lambda: norm(True))
        is_fed = self.is_fed = feed_forward != "none"
        self.feed_forward_norm = norm(is_fed and config.pre_norm and not config.shared_norm)
        self.mixer_end_norm = norm(config.sandwich_norm)
        place, layers = depth
        is_last = place + 1 == layers
        self.end_norm = norm(config.prelude_norm and stack == "prelude" and is_last)
        self.feed_forward_end_norm = norm(is_fed and config.sandwich_norm)
        self.is_parallel, self.has_one_norm = config.parallel_residual, config.shared_norm
        self.residual_scale, self.normalises_sum = config.residual_scale, config.norm_of_sum
        self.stream_scale, self.carries_norm = config.stream_scale, config.carry_norm
        is_connected = config.streams is not None or config.attention_residual is not None
        where = {"stack": stack, "place": place, "is_last": is_last, "is_fed": is_fed}
        where["queries"] = 3 if self.mixer.reads_separately else 1
        self.connections: Any = (
            Connections(config, rngs=rngs, **where) if is_connected else nnx.data(None)
        )

    def __call__(
        self, h: Float[Array, "batch time width"], *,
        segment_ids: Int[Array, "batch time"] | None = None, cache: Any = None,
        window: int | None = None, behind: Array | None = None,
        positions: Int[Array, "batch time"] | None = None, return_routing: bool = False,
        tokens: Int[Array, "batch time"] | None = None, **shared: Array | None,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Process a whole sequence; also returns its cache, or None if there was none.

        With `ladder_residual`, `behind` is the stream that the mixer reads, and a pair of streams
        is returned. With `return_routing` the router's statistics take the place of the cache.
        `shared` is what `shared_inputs` of an earlier block returned; `tokens` are for blocks with
        `reads_tokens`.
        """
        if cache is None and is_streaming():
            if return_routing:
                raise ValueError("block_chunks: not available with return_routing; wanted 1")
            shared = shared or ({} if tokens is None else {"tokens": tokens})
            if behind is not None or segment_ids is not None or positions is not None or shared:
                what = "packed documents" if behind is None else "ladder_residual"
                what = what if positions is None else "recursion"
                what = "rwkv7.value_residual, value_embedding or hash_moe" if shared else what
                raise ValueError(f"block_chunks: not available for {what}; wanted 1")
            return stream_block(self, h, window=window), None
        read = h if behind is None else behind
        how = {"segment_ids": segment_ids, "positions": positions, **shared}
        how |= _tokens_for(self.mixer, tokens)
        mixed, cache = self.mix(read, cache=cache, window=window, **how)
        fed = {"is_ladder": behind is not None, "segment_ids": segment_ids}
        out, routing, cache = self._finish(h, mixed, tokens, cache, **fed)
        if return_routing:
            return out, _statistics(routing)
        return out, cache

    def connected(
        self, state: Any, *,
        cache: Any = None, window: int | None = None, before: Pass | None = None,
        is_step: bool = False, tokens: Int[Array, "..."] | None = None, **how: Any,
    ) -> tuple[Any, Any, Any]:  # fmt: skip
        """A block with connections on the state of its stack, for a sequence or for one token.

        Returns the next state, the cache, and the router's decisions if there is one. `before` is
        what the loop before left, for looped blocks with messages.
        """
        own = self.connections
        read, write = own.mixer(state)
        messages: tuple[Any, ...] = ()
        if own.gates is not None:
            messages = own.gates.messages(before), before
            read = own.gates.of_mixer(read, *messages)
        if is_step:
            x, seen = self.mixer_input(read), _only_if_given(window)
            mixed, cache = self.mixer.step(x, cache, **seen)
        else:
            mixed, cache = self.mix(read, cache=cache, window=window, **how)
        state = write(self._ended(mixed, self.mixer_end_norm))
        if not self.is_fed:
            return state, cache, None
        read, write = own.feed_forward(state)
        if own.gates is not None:
            read = own.gates.of_feed_forward(read, *messages)
        norm = self.feed_forward_norm
        segment_ids = None if is_step else how["segment_ids"]
        fed, routing, cache = self._fed(read, norm, tokens, cache, segment_ids)
        return write(self._ended(fed, self.feed_forward_end_norm)), cache, routing

    def mixer_input(self, h: Any) -> Any:
        """What the mixer reads of the stream."""
        if self.mixer_norm is None:
            return h
        if isinstance(self.mixer_norm, SeparateNorms):
            return Separate(*self.mixer_norm(*(h if isinstance(h, Separate) else (h, h, h))))
        return Separate(*map(self.mixer_norm, h)) if isinstance(h, Separate) else self.mixer_norm(h)

    def mix(
        self, h: Float[Array, "batch time width"] | Separate, *,
        segment_ids: Int[Array, "batch time"] | None = None, cache: Any = None,
        window: int | None = None, positions: Int[Array, "batch time"] | None = None,
        **shared: Array | None,
    ) -> tuple[Float[Array, "batch time width"], Any]:  # fmt: skip
        """The first half: the mixer's output, and the cache after it."""
        read, how = self.mixer_input(h), _only_if_given(window)
        how |= {} if positions is None else {"positions": positions}
        if isinstance(cache, InTurn):
            return cache.read(self.mixer, read, {**how, **shared})
        return self.mixer(read, segment_ids=segment_ids, cache=cache, **how, **shared)

    def shared_inputs(self, h: Any, cache: Any, segment_ids: Any) -> dict[str, Array]:
        """What this block's mixer computes from the stream for itself and for later blocks."""
        read = self.mixer_input(h)
        read = read[:, None] if read.ndim == 2 else read
        return self.mixer.shared_inputs(read, cache, segment_ids)

    def step(
        self, h: Float[Array, "batch width"], cache: Any, *,
        window: int | None = None, behind: Array | None = None,
        tokens: Int[Array, "batch"] | None = None, **shared: Array | None,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Process one token; returns the cache with that token in it."""
        read = self.mixer_input(h if behind is None else behind)
        how = {**_only_if_given(window), **_tokens_for(self.mixer, tokens), **shared}
        mixed, cache = self.mixer.step(read, cache, **how)
        out, _, cache = self._finish(h, mixed, tokens, cache, is_ladder=behind is not None)
        return out, cache

    def finish(self, h: Array, mixed: Array, *, is_ladder: bool = False) -> Any:
        """The second half: add the mixer's output to the stream and apply the feed-forward
        layer."""
        if self.mixer.follows_feed_forward:
            raise ValueError(
                f"{self.mixer.word!r} layers follow the feed-forward layer; call the block whole."
            )
        return self._finish(h, mixed, None, None, is_ladder=is_ladder)[0]

    def _fed(self, read, norm, tokens, cache, segment_ids):
        """The feed-forward layer's output, its router's decisions, and the mixer's cache."""
        how = _tokens_for(self.feed_forward, tokens)
        fed, routing = self.feed_forward.routed(read if norm is None else norm(read), **how)
        if self.mixer.follows_feed_forward:
            fed, cache = self.mixer.after_feed_forward(fed, cache, segment_ids)
        return fed, routing, cache

    def _finish(self, h, mixed, tokens, cache, *, is_ladder, segment_ids=None):
        before = h
        h = self._added(self._stream(h, self.mixer_norm), mixed, self.mixer_end_norm)
        if not self.is_fed:
            return ((h, before) if is_ladder else h), None, cache
        read = before if is_ladder or self.is_parallel else h
        norm = self.mixer_norm if self.has_one_norm else self.feed_forward_norm
        fed, routing, cache = self._fed(read, norm, tokens, cache, segment_ids)
        out = self._added(self._stream(h, norm), fed, self.feed_forward_end_norm)
        return ((out, h) if is_ladder else out), routing, cache

    def _stream(self, h, norm):
        h = norm(h) if self.carries_norm else h
        return h if self.stream_scale == 1 else h * jnp.asarray(self.stream_scale, h.dtype)

    def _added(self, h, more, norm):
        if self.normalises_sum and norm is not None:
            return norm(h + self._scaled(more))
        return h + self._ended(more, norm)

    def _ended(self, more, norm):
        return self._scaled(more if norm is None else norm(more))

    def _scaled(self, more):
        if self.residual_scale != 1:
            more = more * jnp.asarray(self.residual_scale, more.dtype)
        return more


def run_blocks(
    blocks: Sequence[Block], h: Any, *,
    windows: tuple[int | None, ...] | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
    positions: Int[Array, "batch time"] | None = None, caches: tuple[Any, ...] | None = None,
    residual: GroupResidual | None = None, before: Pass | None = None,
    return_routing: bool = False, tokens: Int[Array, "..."] | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Run a stack of physical layers on a sequence [batch, time, width] or, with caches, on one
    token [batch, width].

    Returns the stream and the new caches, or with `return_routing` in their place the statistics
    of the layers that have a router, which are of whole sequences. `tokens` are read by layers with
    embeddings of their own. In models with messages the
    stream between stacks is a `Sourced`, and `before` what the loop before left.
    """
    others: list[Any] = []
    is_step = jax.tree.leaves(h)[0].ndim == 2
    none = (None,) * len(blocks)
    stack = list(zip(blocks, windows or none, caches or none, strict=True))
    where: dict[str, Any] = {"segment_ids": segment_ids, "positions": positions}
    if len(blocks) and blocks[0].connections is not None:
        if not is_step and caches is None and is_streaming():
            raise ValueError("block_chunks: not available with streams of connections; wanted 1")
        how = {"before": before, "is_step": is_step, **({} if is_step else where)}
        state = blocks[0].connections.opened(h)
        for block, window, cache in stack:
            own = {**how, **_tokens_for(block, tokens)}
            state, other, routing = block.connected(state, cache=cache, window=window, **own)
            others.append(_statistics(routing) if return_routing else other)
        h = blocks[-1].connections.closed(state)
    elif residual is None and not is_step and can_scan(blocks) and not is_streaming():
        how = {**where, "return_routing": return_routing}
        h, others = run_scanned(blocks, h, windows or none, caches or none, **how)
    else:
        is_ladder = bool(len(blocks)) and blocks[0].is_ladder
        start, behind = h, h if is_ladder else None
        first, values = "", {}  # the word of layers that share inputs, and those
        how = {**where, "return_routing": return_routing}
        for layer, (block, window, cache) in enumerate(stack):
            if block.shares_inputs:
                first, values = block.word, block.shared_inputs(h, cache, segment_ids)
            shared = values if block.word == first else {}
            shared = {**shared, **_tokens_for(block, tokens)}
            if is_step:
                h, other = block.step(h, cache, window=window, behind=behind, **shared)
            else:
                h, other = block(h, cache=cache, window=window, behind=behind, **shared, **how)
            h, behind = h if is_ladder else (h, None)
            h, start = (h, start) if residual is None else residual(layer, h, start)
            others.append(other)
    if len(blocks) and blocks[-1].end_norm is not None:
        h = blocks[-1].end_norm(h)
    if return_routing:
        return h, tuple(statistics for statistics in others if statistics is not None)
    return h, None if caches is None else tuple(others)


def _statistics(routing: Any) -> Any:
    return None if routing is None else routing_statistics(routing)


def _tokens_for(reader, tokens):
    return {"tokens": tokens} if reader.reads_tokens else {}


def _only_if_given(window):
    """Only softmax layers know windows; a configuration gives no other layer one."""
    return {} if window is None else {"window": window}
