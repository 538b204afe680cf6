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

MASTER = 4  # bytes of a parameter, and of each moment of Adam
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
    stream = tokens * width * size // tensor
    # The products with weights: queries, keys, values, output, gate, up, down.
    products = tokens * (queries + 2 * keys + 2 * hidden) * size + 2 * stream
    # Beside them, kept where nothing is recomputed: both normed inputs with their float32 squares,
    # the rotated queries and keys, the heads' outputs and the products inside SwiGLU.
    whole_width = tokens * width * size
    others = tokens * (2 * queries + keys + 3 * hidden) * size + 2 * stream + 4 * stream
    kept = {"none": stream + products + others, "elementwise": stream + products, "layer": stream}
    working = products + others + 2 * whole_width * (tensor > 1)
    tensors = layer_tensors(config, word)
    return Layer(held(tensors, strategy), kept[recompute], working)


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
    rest = held(rest_tensors(config), strategy)
    kept_numbers = body.kept + table.kept * count + rest.kept
    moments = body.moment + table.moment * count + rest.moment
    accumulates = strategy.microbatches > 1
    gradient = MASTER * kept_numbers
    largest = max(found, key=lambda word: found[word].held.used)
    layer = found[largest]
    gathered = 2 * size * layer.held.used
    tokens = sequences * length
    logits = 0
    if has_head:
        share = -(-config.vocabulary // strategy.tensor) * MASTER // strategy.head_chunks
        logits = LOGIT_COPIES * tokens * share
    stream = tokens * config.width * size
    at_head = 2 * size * table.used + logits + 2 * stream if has_head else 0
    table_gradient = size * table.used * (has_head + 0)
    in_layers = table_gradient + gathered + layer.working
    head_is_larger = at_head > in_layers + MASTER * body.kept * (not accumulates)
    activations = kept * in_flight
    common = {
        "parameters": MASTER * kept_numbers,
        "optimizer": 2 * MASTER * moments,
        "inputs": 2 * MASTER * (batch // strategy.batch_shards) * length,
    }
    if head_is_larger:
        return Memory(
            **common,
            gradients=gradient * accumulates,
            activations=activations,
            gathered=2 * size * table.used,
            working=logits + 2 * stream,
        )
    return Memory(
        **common,
        gradients=gradient * (1 + accumulates)
        if accumulates
        else MASTER * body.kept + table_gradient,
        activations=activations,
        gathered=gathered,
        working=layer.working,
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
