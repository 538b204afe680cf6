"""Numbers that one chip holds under a strategy, by tensor."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
from flax import nnx

from toolkit.looped import LoopedConfig
from toolkit.looped.mixing import LAYERS
from toolkit.planning.models import expert_hidden, local_config
from toolkit.planning.strategy import Strategy

FLOAT32 = 4  # bytes of a parameter, and of each moment of Adam
Tensors = tuple[tuple[tuple[int, ...], int | None], ...]
# A matrix with fewer elements is replicated.
SMALLEST_SHARDED = 1 << 14
SOFTMAX = ("full", "window")  # layers whose formulas are written down
LANES = 128  # of a TPU, whose tiles are as many columns wide


def is_sharded(shape: tuple[int, ...]) -> bool:
    """Whether a tensor of one layer is large enough for ZeRO to cut it."""
    return len(shape) >= 2 and math.prod(shape) >= SMALLEST_SHARDED


@functools.lru_cache(maxsize=4096)
def layer_tensors(config: LoopedConfig, word: str, fed: str) -> Tensors:
    """Shape of every parameter of a layer, and the dimension that "tensor" cuts, if any; of a
    mixture of experts nothing but the norm before it."""
    width, hidden = config.width, config.feed_forward_size
    rest: Tensors = (((width,), None),) * 2
    if fed == "swiglu":
        rest += (((width, hidden), 1),) * 2 + (((hidden, width), 0),)
    if word not in ("full", "window"):
        shapes = _traced_shapes(alone(config, word))
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


def alone(config: LoopedConfig, word: str, **changes: Any) -> LoopedConfig:
    """A configuration of one layer with that mixer and a SwiGLU."""
    options = {name: own for name, own in config.options.items() if name != "moe"}
    sizes: dict[str, Any] = {"vocabulary": 1, "loops": 1, "feed_forwards": "swiglu"} | changes
    return dataclasses.replace(config, pattern=word, options=options, **sizes)


@functools.lru_cache(maxsize=256)
def mixture_tensors(config: LoopedConfig, is_folded: bool) -> tuple[Tensors, Tensors, Tensors]:
    """The same of the experts, the router and the shared expert. If folded, "tensor" stands for
    the chips that cut the number of experts, and the shared expert is cut by none."""
    moe, width, hidden = config.moe, config.width, expert_hidden(config)

    def cut(dimension: int | None) -> int | None:
        return 0 if is_folded else dimension

    inner, count, own = (moe.experts, width, hidden), moe.experts, moe.shared_hidden
    experts: Tensors = ((inner, cut(2)), (inner, cut(2)), ((count, hidden, width), cut(1)))
    if moe.biases:
        experts += (((count, hidden), cut(1)),) * 2 + (((count, width), cut(None)),)
    router: Tensors = (((width, count), None),)
    router += (((count,), None),) if moe.router_bias else ()
    shared: Tensors = ()
    if own:
        columns, rows = (None, None) if is_folded else (1, 0)
        shared = (((width, own), columns),) * 2 + (((own, width), rows),)
    shared += (((width, 1), None),) if moe.shared_gate else ()
    return experts, router, shared


class Part(NamedTuple):
    """Tensors of a layer that are cut alike.

    Attributes:
        share: one chip's share.
        strategy: the degrees with which its collectives run.
        itemsize: bytes of a number when it is computed with.
    """

    share: "Held"
    strategy: Strategy
    itemsize: int


def layer_parts(config: LoopedConfig, word: str, fed: str, strategy: Strategy) -> tuple[Part, ...]:
    """One chip's share of a layer: what "tensor" cuts, then the experts, and what every chip of
    "tensor" has whole, the router first."""
    size, tensors = config.compute_dtype.itemsize, layer_tensors(config, word, fed)
    strategy = strategy.for_parameters
    if fed == "swiglu":
        return (Part(share_of(tensors, strategy), strategy, size),)
    is_folded = strategy.expert > 1
    experts, router, shared = mixture_tensors(config, is_folded)
    whole, inner = strategy.changed(tensor=1), strategy.of_experts
    # Their gradients are summed over "tensor" too.
    beside = whole.changed(data=strategy.data * strategy.tensor)
    parts = [
        Part(share_of(tensors if is_folded else tensors + shared, strategy), strategy, size),
        Part(share_of(experts, inner), inner, size),
        Part(share_of(router, whole), beside, FLOAT32),
    ]
    return (*parts, Part(share_of(shared, whole), beside, size)) if is_folded else tuple(parts)


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


def share_of(tensors: tuple, strategy: Strategy) -> Held:
    """One chip's share of some tensors."""
    cut = strategy.for_parameters
    data = cut.data if cut.shard_optimizer else 1
    return _share_of(tensors, cut.tensor, cut.fsdp, data)


@functools.lru_cache(maxsize=4096)
def _share_of(tensors: tuple, tensor: int, fsdp: int, data: int) -> Held:
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


def head_size(config: LoopedConfig, word: str) -> int:
    """Channels of one head."""
    size = config.options[word].head_size if word in SOFTMAX else None
    return size or config.width // config.heads


@functools.lru_cache(maxsize=256)
def cache_bytes(config: LoopedConfig, word: str, tensor: int, length: int) -> int:
    """Bytes of what one layer on one chip of "tensor" passes on from slice to slice of a sequence
    of that length."""
    local = local_config(config, tensor, is_folded=False)
    cache = jax.eval_shape(lambda: LAYERS[word].empty_cache(local, 1, length))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))


def channels(config: LoopedConfig, word: str) -> tuple[int, int]:
    """Channels of queries and of keys; other layers keep about as much."""
    if word not in SOFTMAX:
        return config.width, config.width
    options, size = config.options[word], head_size(config, word)
    return config.heads * size, (options.key_value_heads or config.heads) * size
