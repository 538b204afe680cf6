"""What one chip holds while it trains, by category.

A step has three moments that may be its largest, with s the tokens of a chip's microbatch:

    head        the logits of a chunk with their gradient, the vocabulary's table and its gradient
    layers      the gradients of all layers, one layer gathered with its gradient, its intermediates
    update      the gradients of everything

Parameters, the optimiser's moments and what the layers keep for the backward pass are there in the
first two; the update needs the first two and all gradients.
"""

from collections import Counter
from typing import NamedTuple

from toolkit.looped import LoopedConfig
from toolkit.planning.sizes import Held, held, layer_tensors, rest_tensors, table_tensors
from toolkit.planning.strategy import Strategy

FLOAT32 = 4  # bytes of a parameter, and of each moment of Adam
SWIGLU = 10  # numbers per hidden unit and token in one layer's forward and backward pass
SWIGLU_KEPT, SWIGLU_GRADIENTS = 6, 3  # of them, those that the former keeps, and the latter adds
LOGIT_COPIES = 2  # logits and their gradient, float32


class Memory(NamedTuple):
    """Bytes on one chip at the moment of the step that needs most.

    Attributes:
        parameters: float32, as kept between steps.
        optimizer: Adam's two moments, float32.
        gradients: float32; of the layers, and of tables in the compute type.
        activations: what the forward pass keeps for the backward pass.
        gathered: parameters gathered for use, in the compute type, and their gradients.
        working: intermediates of one layer, or logits of one chunk.
        inputs: tokens and targets.

    Example:
        >>> Memory(4, 8, 4, 0, 0, 0, 0).total
        16
    """

    parameters: int
    optimizer: int
    gradients: int
    activations: int
    gathered: int
    working: int
    inputs: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)

    @property
    def arguments(self) -> int:
        """What a compiled step counts as its arguments."""
        return self.parameters + self.optimizer + self.inputs

    @property
    def temporary(self) -> int:
        """What a compiled step counts as temporary."""
        return self.total - self.arguments


class Layer(NamedTuple):
    """One layer on one chip: what it holds, keeps and works with, in bytes and numbers.

    Attributes:
        held: its parameters.
        kept: bytes for the backward pass, per microbatch in flight.
        working: bytes of its intermediates while its backward pass runs.
    """

    held: Held
    kept: int
    working: int


def layer_memory(
    config: LoopedConfig,
    word: str,
    recompute: str,
    strategy: Strategy,
    sequences: int,
    length: int,
) -> Layer:
    """One layer of a microbatch of so many sequences per chip."""
    size = config.compute_dtype.itemsize
    tokens, tensor = sequences * length, strategy.tensor
    width, hidden = config.width, config.feed_forward_size // tensor
    queries, keys = channels(config, word)
    queries, keys = queries // tensor, keys // tensor
    whole = tokens * width * size  # the residual stream, all of time
    stream = whole // tensor
    # Products with weights: queries, keys, values, gate and up, and the output before its sum over
    # "tensor" is taken; the backward pass does not read that of down.
    products = tokens * (queries + 2 * keys + 2 * hidden) * size + whole
    # What else the backward pass reads: squares and roots of the norms in float32, rotated queries
    # and keys, the heads' outputs, what SwiGLU multiplies.
    norms = 8 * FLOAT32 * tokens * width // tensor
    mixed = norms + tokens * (3 * queries + 2 * keys) * size
    unit = tokens * hidden * size
    kept = {
        "none": stream + mixed + SWIGLU_KEPT * unit,
        "elementwise": stream + products,
        "layer": stream,
    }
    # What is computed anew is there once more; without that, only gradients come on top.
    anew = mixed + SWIGLU * unit + 2 * whole * (tensor > 1)
    working = SWIGLU_GRADIENTS * unit + 2 * whole if recompute == "none" else anew
    return Layer(held(layer_tensors(config, word), strategy), kept[recompute], working)


def memory_of(
    config: LoopedConfig,
    strategy: Strategy,
    batch: int,
    length: int,
    *,
    layers: tuple[tuple[str, str], ...] | None = None,
    in_flight: int = 1,
    has_embedding: bool = True,
    has_head: bool = True,
) -> Memory:
    """Memory of one chip that holds some layers (None: all), for microbatches in flight."""
    size = config.compute_dtype.itemsize
    sequences = batch // (strategy.batch_shards * strategy.microbatches)
    words = tuple(layer_kinds(config, strategy)) if layers is None else layers
    found = {kind: layer_memory(config, *kind, strategy, sequences, length) for kind in set(words)}
    body, kept = Held(0, 0, 0), 0
    for word, count in Counter(words).items():
        body += found[word].held.times(count)
        kept += found[word].kept * count * config.loops
    tables = table_tensors(config, strategy.tensor)
    table = held(tables[:1], strategy)
    count = len(tables) if has_embedding and has_head else int(has_embedding or has_head)
    numbers = body + table.times(count) + held(rest_tensors(config), strategy)
    # Layers of one size work with more or less, by what they recompute.
    largest = max(found.values(), key=lambda layer: 2 * size * layer.held.used + layer.working)
    tokens = sequences * length
    # The compiler takes the cast of stacked layers out of their loop, and so keeps all of them in
    # the compute type, unless one layer is cast again for its own recomputing.
    is_cast = size < FLOAT32 and (strategy.fsdp > 1 or {"layer"} != {kind[1] for kind in words})
    copies = size * body.kept * is_cast
    # Where nothing is recomputed, that copy is there in two layouts, one per pass, and the head's
    # table stays as it was used, with its gradient in float32.
    is_kept = "none" in {kind[1] for kind in words}
    accumulated = FLOAT32 * numbers.kept * (strategy.microbatches > 1)
    activations = kept * in_flight
    logits = FLOAT32 * tokens * -(-config.vocabulary // strategy.tensor) // strategy.head_chunks
    use = size * table.used
    moments = (
        # gradients, activations, gathered, working
        (
            accumulated,
            activations,
            copies + 2 * use,
            LOGIT_COPIES * logits + 2 * tokens * config.width * size,
        )
        if has_head
        else (0, 0, 0, 0),
        (
            accumulated + FLOAT32 * body.kept + (1 + is_kept) * use * has_head,
            activations,
            (1 + is_kept) * copies + 2 * size * largest.held.used + is_kept * use * has_head,
            largest.working,
        ),
        (accumulated + FLOAT32 * numbers.kept, 0, 2 * use * count, 0),
    )
    gradients, kept, gathered, working = max(moments, key=sum)
    return Memory(
        parameters=FLOAT32 * numbers.kept,
        optimizer=2 * FLOAT32 * numbers.moment,
        gradients=gradients,
        activations=kept,
        gathered=gathered,
        working=working,
        inputs=2 * FLOAT32 * (batch // strategy.batch_shards) * length,
    )


def layer_kinds(config: LoopedConfig, strategy: Strategy) -> list[tuple[str, str]]:
    """Word and recomputing of every layer."""
    runs = strategy.runs(len(config.layers))
    words = iter(config.layers)
    return [(next(words), recompute) for recompute, count in runs for _ in range(count)]


def channels(config: LoopedConfig, word: str) -> tuple[int, int]:
    """Channels of queries and of keys; layers that are not softmax keep about as much."""
    if word not in ("full", "window"):
        return config.width, config.width
    options = config.options[word]
    size = options.head_size or config.width // config.heads
    return config.heads * size, (options.key_value_heads or config.heads) * size
