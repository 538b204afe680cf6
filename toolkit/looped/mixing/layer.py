"""The base of every token-mixing layer: its word, its options, and its view of the model's
configuration."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from toolkit._checks import check_fields

MOST: dict[str, int] = {"loops": 4096, "convolution_size": 256}
"""Upper bounds beyond which a configuration is surely a mistake; other numbers are bounded by the
size of an array."""


class Separate(NamedTuple):
    """What the queries, keys and values of a softmax layer are made of, where that differs."""

    query: Float[Array, "... width"]
    key: Float[Array, "... width"]
    value: Float[Array, "... width"]


@dataclasses.dataclass(frozen=True)
class LayerOptions:
    """Options of one kind of layer; none by default, and a subclass where there are some."""

    @classmethod
    def tiny(cls) -> "LayerOptions":
        """The options in `LoopedConfig.tiny`, for texts of 64 to 256 bytes."""
        return cls()


class OptionsByWord(dict):
    """An immutable dict, so that a configuration that holds it is hashable."""

    def _refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("options of a configuration cannot change; see LoopedConfig.with_options.")

    __setitem__ = __delitem__ = __ior__ = _refuse
    pop = popitem = clear = update = setdefault = _refuse

    def __hash__(self):
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(frozenset(self.items()))

    def __reduce__(self):
        return OptionsByWord, (dict(self),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """The fields of `LoopedConfig` that layers may read."""

    width: int = 256
    heads: int = 4
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-6
    dtype: str = "float32"
    options: Mapping[str, Any] = OptionsByWord()

    @property
    def compute_dtype(self) -> jnp.dtype:
        """`dtype` as a NumPy type."""
        return jnp.dtype(self.dtype)


class ConfiguredLayer(nnx.Module):
    """A layer with a word and options of its own."""

    word: ClassVar[str]  # its name in a configuration
    Options: ClassVar[type[LayerOptions]] = LayerOptions  # the dataclass of its options
    can_cut_time: ClassVar[bool] = False  # whether it can read sequences sharded over devices

    @classmethod
    def options_of(cls, config: LayerConfig) -> Any:
        """The options of these layers in a model, an instance of `Options`."""
        return config.options.get(cls.word) or cls.Options()

    @classmethod
    def check(cls, config: LayerConfig) -> None:
        """Refuse options that no layer can have, naming the option."""
        check_numbers(cls.options_of(config), f"{cls.word}.")


class MixingLayer(ConfiguredLayer):
    """A layer that mixes tokens, made as Layer(config, rngs=rngs); `toolkit.looped.mixing` lists
    what it can do.

    Attributes:
        word: its name in patterns.
        mixer: the name in `MIXERS` of what it wraps, its word if this is empty.
        Options: the dataclass of its options.
        is_recurrent: whether its cache is a state that does not grow.
        starts_from_attention: whether it can take over attention's queries, keys, values and
            output, so that `toolkit.conversion` can replace attention by it.
        can_cut_time: whether it can mix sequences sharded over devices.
        has_depth: whether it is made with `depth`, its number in the stack and the number of all.
        has_rows: whether its `rows` computes the last rows of its output at a part of the cost.
        reads_tokens: whether its calls and steps take the `tokens` beside their stream.
        reads_separately: whether queries, keys and values have a norm of their own, and where a
            block attends to earlier layers an input of their own.
        follows_feed_forward: whether its `after_feed_forward` changes what the block's feed-forward
            layer returns.
        shares_inputs: whether later layers of its stack read its `shared_inputs`.
    """

    mixer: ClassVar[str] = ""
    is_recurrent: ClassVar[bool] = False
    starts_from_attention: ClassVar[bool] = False
    has_depth: ClassVar[bool] = False
    has_rows: ClassVar[bool] = False
    reads_tokens: ClassVar[bool] = False
    reads_separately: ClassVar[bool] = False
    follows_feed_forward: ClassVar[bool] = False
    shares_inputs: bool = False

    @classmethod
    def window_of(cls, config: LayerConfig) -> int | None:
        """Tokens a query sees; None for all."""
        return None

    def shared_inputs(self, x: Any, cache: Any, segment_ids: Any) -> dict[str, Array]:
        """What a layer computes from its input [batch, time, width] for itself and for all later
        layers of its stack: further arguments of their calls and steps."""
        raise NotImplementedError(f"{self.word!r} layers share nothing")

    def rows(self, x: Any, lo: int, *, window: int | None = None) -> Any:
        """The outputs from token `lo` on, for layers with `has_rows`."""
        raise NotImplementedError(f"{self.word!r} layers mix all tokens at once")


def check_numbers(fields: Any, prefix: str = "") -> None:
    """Refuse fields of the wrong type, and integers that are not positive or too large."""
    check_fields(fields, prefix)
    for field in dataclasses.fields(fields):
        number = getattr(fields, field.name)
        if number is None or field.type not in (int, int | None):
            continue
        most = MOST.get(field.name) or 2**31 - 1
        if not 1 <= number <= most:
            bound = "at least 1" if number < 1 else f"at most {most:,}"
            raise ValueError(f"{prefix}{field.name} must be {bound}; got {number}.")
