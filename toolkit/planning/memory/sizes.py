"""Numbers that one chip holds under a strategy, by tensor."""

import dataclasses
import functools
import math

import jax
from flax import nnx

from toolkit.looped import LoopedConfig
from toolkit.looped.mixing import LAYERS
from toolkit.planning.strategy import Strategy

# A matrix with fewer elements is replicated.
SMALLEST_SHARDED = 1 << 14
LANES = 128  # of a TPU, whose tiles are as many columns wide


def is_sharded(shape: tuple[int, ...]) -> bool:
    """Whether a tensor of one layer is large enough for ZeRO to cut it."""
    return len(shape) >= 2 and math.prod(shape) >= SMALLEST_SHARDED


@functools.lru_cache(maxsize=4096)
def layer_tensors(
    config: LoopedConfig, word: str
) -> tuple[tuple[tuple[int, ...], int | None], ...]:
    """Shape of every parameter of a layer, and the dimension that "tensor" cuts, if any."""
    width, hidden = config.width, config.feed_forward_size
    rest = (((width,), None),) * 2 + (((width, hidden), 1),) * 2 + (((hidden, width), 0),)
    if word not in ("full", "window"):
        shapes = _traced_shapes(dataclasses.replace(config, pattern=word, vocabulary=1, loops=1))
        return (*((shape, None) for shape in shapes), *rest)
    options = config.options[word]
    size = options.head_size or width // config.heads
    queries, keys = config.heads * size, (options.key_value_heads or config.heads) * size
    mixer = [((width, queries), 1), ((width, keys), 1), ((width, keys), 1), ((queries, width), 0)]
    if options.projection_biases:
        mixer += [((size,), 0) for size in (queries, keys, keys)]
    if options.output_bias:
        mixer.append(((width,), None))
    if options.sinks:
        mixer.append(((config.heads,), 0))
    if options.output_gate:
        mixer.append(((width, queries), 1))
    if options.query_key_norm:
        mixer += [((size,), None)] * 2
    if options.projection_norm:
        mixer += [((queries,), None), ((keys,), None)]
    return (*mixer, *rest)


@functools.lru_cache(maxsize=256)
def _traced_shapes(config: LoopedConfig) -> tuple[tuple[int, ...], ...]:
    layer = nnx.eval_shape(lambda: LAYERS[config.pattern](config, rngs=nnx.Rngs(0)))
    return tuple(leaf.shape for leaf in jax.tree.leaves(nnx.state(layer, nnx.Param)))


@dataclasses.dataclass(frozen=True)
class Held:
    """Numbers on one chip: of parameters as kept, of parameters as computed with (gathered over
    "fsdp"), of each moment of the optimiser, and of those computed with in matrices whose share of
    columns is an odd number of `LANES`."""

    kept: int
    used: int
    moment: int
    odd: int = 0

    def __add__(self, other: "Held") -> "Held":
        return Held(
            self.kept + other.kept,
            self.used + other.used,
            self.moment + other.moment,
            self.odd + other.odd,
        )

    def times(self, count: int) -> "Held":
        """`count` times this."""
        return Held(self.kept * count, self.used * count, self.moment * count, self.odd * count)


def held(tensors: tuple, strategy: Strategy) -> Held:
    """One chip's share of some tensors."""
    data = strategy.data if strategy.shard_optimizer else 1
    return _held(tensors, strategy.tensor, strategy.fsdp, data)


@functools.lru_cache(maxsize=4096)
def _held(tensors: tuple, tensor: int, fsdp: int, data: int) -> Held:
    """`data` counts the shards of the optimiser's state beside `fsdp`."""
    total = Held(0, 0, 0)
    for shape, cut in tensors:
        rows = list(shape)
        if cut is not None:
            rows[cut] //= tensor
        used = kept = moment = math.prod(rows)
        odd = 0
        if is_sharded(shape):
            free = {i: shape[i] for i in range(len(shape)) if i != cut or tensor == 1}
            dimension = _largest(free, fsdp)
            if dimension is not None and fsdp > 1:
                kept = moment = used // fsdp
                tiles, rest = divmod(rows[dimension] // fsdp, LANES)
                odd = used * (dimension == len(rows) - 1 and tiles % 2 == 1 and not rest)
                free.pop(dimension)
            if data > 1 and _largest(free, data) is not None:
                moment = kept // data
        total += Held(kept, used, moment, odd)
    return total


def _largest(sizes: dict[int, int], parts: int) -> int | None:
    fits = [i for i, size in sizes.items() if size % parts == 0]
    return max(fits, key=lambda i: sizes[i]) if fits else None


def table_tensors(config: LoopedConfig, tensor: int) -> tuple:
    """The embedding, padded for "tensor", and an untied head's table."""
    rows = -(-config.vocabulary // tensor) * tensor
    return (((rows, config.width), 0),) * (1 if config.tied_embedding else 2)


def rest_tensors(config: LoopedConfig) -> tuple:
    """The final norm, and a gate per loop."""
    loops = ((config.loops, config.width), None)
    return (((config.width,), None), loops) if config.residual_gate else (((config.width,), None),)
