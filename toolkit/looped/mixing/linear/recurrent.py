"""The frame of every recurrent layer: project, mix through a state, normalise, gate, project.

A layer defines the mixer's inputs (`project`) and may redefine the treatment of its outputs
(`finish`). Both work on [batch, time, ...]; decoding is a sequence of one token, mixed by the
mixer's step. The layer's word names the mixer's row in `toolkit.attention.MIXERS`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from toolkit.attention import MIXERS
from toolkit.attention._caches import cleared, picked
from toolkit.looped.layers import linear, token_positions
from toolkit.looped.mixing.layer import LayerConfig, LayerOptions, MixingLayer
from toolkit.parallel.context.along import sequence_mixer


@dataclasses.dataclass(frozen=True)
class RecurrentOptions(LayerOptions):
    """Sizes of a recurrent layer.

    Attributes:
        heads: heads of q and k (None: the model's `heads`).
        key_size: size of a head's key (None: the paper's share of width / heads).
        value_size: size of a head's value (None: likewise).
    """

    heads: int | None = None
    key_size: int | None = None
    value_size: int | None = None


@dataclasses.dataclass(frozen=True)
class GroupedOptions(RecurrentOptions):
    """`RecurrentOptions` and `value_heads`, a multiple of `heads` (None: `heads`): each head of q
    and k serves as many heads of v."""

    value_heads: int | None = None


class RecurrentSizes(NamedTuple):
    """Head counts and head sizes; each head of q and k serves a group of value heads."""

    heads: int
    value_heads: int
    key_size: int
    value_size: int

    @property
    def keys(self) -> int:
        """Channels of all heads of q, or of k."""
        return self.heads * self.key_size

    @property
    def values(self) -> int:
        """Channels of all heads of v."""
        return self.value_heads * self.value_size


class RecurrentCache(NamedTuple):
    """The decode-time state of a recurrent layer, constant in size."""

    # the mixer's, such as float32 [batch, value heads, key, value]; a pytree whose arrays begin
    # with [batch, value heads]
    state: Any
    # the last inputs of the short convolution or token shift [batch, past, channels], or None
    tail: Float[Array, "batch past channels"] | None = None
    # tokens of each row's document so far, int32, for layers with positions; None for the others
    length: Int[Array, "batch"] | None = None

    def free(self, rows: Int[Array, "rows"] | Bool[Array, "batch"]) -> "RecurrentCache":
        """Clear some rows for other sequences."""
        return jax.tree.map(lambda array: cleared(array, rows), self)

    def truncate(self, lengths: Int[Array, "batch"]) -> NoReturn:
        """Refused: a state cannot take tokens back; see `restore`."""
        raise TypeError(
            "a recurrent state cannot take tokens back; keep the cache before they were added and "
            "call cache.restore([before], which)."
        )

    def restore(
        self, earlier: Sequence["RecurrentCache"], which: Int[Array, "batch"]
    ) -> "RecurrentCache":
        """Go back to an earlier state, row b to that of earlier[which[b]]."""
        return jax.tree.map(lambda *arrays: picked(arrays, which), *earlier)


class Projection(NamedTuple):
    """A layer's input as prepared for the mixer."""

    # arguments of the mixer in the order of its row, each [batch, time, heads, ...]
    inputs: tuple[Array, ...]
    tail: Array | None = None  # the new tail of the cache, or None
    aside: Any = None  # further arrays for `finish`


class RecurrentLayer(MixingLayer):
    """Linear-time mixing through a state [key, value] per head, the base of all such layers.

        y = (RMSNorm(mixer(inputs(x))) * activation(gate(x))) W_o     (norm per head; gate optional)

    Source: LT2, section on mixers, for what the layers have in common and their default sizes.
    """

    Options: ClassVar[type[LayerOptions]] = GroupedOptions
    is_recurrent: ClassVar[bool] = True
    can_cut_time: ClassVar[bool] = True
    # key_share, value_share: default sizes of a head's key and value, in units of width / heads
    key_share: ClassVar[float] = 1.0
    value_share: ClassVar[float] = 1.0
    has_positions: ClassVar[bool] = False  # whether the cache counts tokens
    gate_activation = staticmethod(jax.nn.silu)

    def __init__(
        self, config: LayerConfig, *, gate: Callable[[Array], Array] | None, rngs: nnx.Rngs
    ):
        width, dtype = config.width, config.compute_dtype
        self.sizes = self.sizes_of(config)
        self.gate = nnx.data(gate)
        self.output = linear(self.sizes.values, width, dtype, rngs, std=width**-0.5)
        self.norm = nnx.RMSNorm(
            self.sizes.value_size, epsilon=config.norm_epsilon, dtype=dtype, rngs=rngs
        )

    @classmethod
    def sizes_of(cls, config: LayerConfig) -> RecurrentSizes:
        """Head counts and sizes from the options, or the paper's share of the width."""
        options = cls.options_of(config)
        heads = options.heads or config.heads
        return RecurrentSizes(
            heads,
            getattr(options, "value_heads", None) or heads,
            options.key_size or max(1, round(cls.key_share * config.width / heads)),
            options.value_size or max(1, round(cls.value_share * config.width / heads)),
        )

    @classmethod
    def check(cls, config: LayerConfig) -> None:
        super().check(config)
        heads, value_heads, *_ = cls.sizes_of(config)
        if value_heads % heads:
            raise ValueError(
                f"{cls.word}.value_heads {value_heads} is not a multiple of heads {heads}."
            )

    @classmethod
    def tail_shape(cls, config: LayerConfig) -> tuple[int, int] | None:
        """Tokens and channels of the tail; None if the layer treats tokens one by one."""
        return None

    @classmethod
    def empty_state(cls, config: LayerConfig, batch: int, capacity: int) -> Any:
        """The state of the mixer before any token."""
        _, *sizes = cls.sizes_of(config)
        return MIXERS[cls.mixer or cls.word].empty_state(
            batch, *sizes, capacity, config.compute_dtype
        )

    @classmethod
    def empty_cache(cls, config: LayerConfig, batch: int, capacity: int) -> RecurrentCache:
        """A zero state and tail; the capacity does not matter."""
        dtype, tail = config.compute_dtype, cls.tail_shape(config)
        return RecurrentCache(
            state=cls.empty_state(config, batch, capacity),
            tail=None if tail is None else jnp.zeros((batch, *tail), dtype),
            length=jnp.zeros(batch, jnp.int32) if cls.has_positions else None,
        )

    def project(
        self, x: Float[Array, "batch time width"], past: RecurrentCache | None,
        segment_ids: Int[Array, "batch time"] | None, **shared: Array,
    ) -> Projection:  # fmt: skip
        """The mixer's inputs; `past` is the tail of what came before x, if any. `shared` is what
        `shared_inputs` of an earlier layer returned."""
        raise NotImplementedError

    def finish(
        self, x: Float[Array, "batch time width"], out: Array, aside: Any
    ) -> Float[Array, "batch time width"]:
        """Normalise every head, gate, and project to the width."""
        out = self.norm(out)
        if self.gate is not None:
            out *= self.gate_activation(self.gate(x)).reshape(out.shape)
        return self.output(out.reshape(*x.shape[:-1], -1))

    def __call__(
        self, x: Float[Array, "batch time width"], *,
        segment_ids: Int[Array, "batch time"] | None = None, cache: RecurrentCache | None = None,
        **shared: Array,
    ) -> tuple[Float[Array, "batch time width"], RecurrentCache | None]:  # fmt: skip
        """Mix a sequence; with a cache it continues from the cache's state."""
        inputs, tail, aside = self.project(x, cache, segment_ids, **shared)
        start = None if cache is None else cache.state
        past = {"segment_ids": segment_ids, "initial_state": start}
        out, state = sequence_mixer(self.mixer or self.word, inputs, **past)
        y = self.finish(x, out, aside)
        if cache is None:
            return y, None
        length = cache.length
        if length is not None:
            length = token_positions(x.shape[:2], length, segment_ids)[:, -1] + 1
        return y, RecurrentCache(state, tail, length)

    def step(
        self, x_t: Float[Array, "batch width"], cache: RecurrentCache, **shared: Array
    ) -> tuple[Float[Array, "batch width"], RecurrentCache]:
        """Mix one token, which reads and writes the state once."""
        x = x_t[:, None]
        inputs, tail, aside = self.project(x, cache, None, **shared)
        step = MIXERS[self.mixer or self.word].step
        out_t, state = step(*(a[:, 0] for a in inputs), cache.state)
        length = None if cache.length is None else cache.length + 1
        return self.finish(x, out_t[:, None], aside)[:, 0], RecurrentCache(state, tail, length)


def split_heads(x: Float[Array, "... channels"], size: int) -> Float[Array, "... heads size"]:
    """[..., heads * size] -> [..., heads, size]."""
    return x.reshape(*x.shape[:-1], -1, size)


class StateSpaceLayer(RecurrentLayer):
    """The sizes of Mamba-2 and Mamba-3: values of twice the width, groups of keys for all heads."""

    @classmethod
    def sizes_of(cls, config: LayerConfig) -> RecurrentSizes:
        options = cls.options_of(config)
        heads = options.heads or config.heads
        value_heads = options.value_heads or heads
        return RecurrentSizes(
            heads if options.value_heads else 1,
            value_heads,
            options.key_size,
            options.value_size or max(1, round(2 * config.width / value_heads)),
        )
