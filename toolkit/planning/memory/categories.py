"""Memory of one chip during training, by category.

The peak of a step is at one of three moments:

    head        the logits of a chunk with their gradient, the vocabulary's table and its gradient
    layers      the gradients of all layers and of the table, one layer with its intermediates
    update      the gradients of everything

Parameters and the optimiser's moments are always held, and activations in the first two. The
lifetimes were read off libtpu's schedules (`data/planning/README.md` lists them).
"""

import functools
from collections import Counter
from typing import NamedTuple

from toolkit.looped import LoopedConfig
from toolkit.looped.mixing import LAYERS
from toolkit.planning.memory.kept import kept_per_token
from toolkit.planning.memory.mixtures import mixture_memory
from toolkit.planning.memory.sizes import (
    FLOAT32,
    LANES,
    SOFTMAX,
    Held,
    cache_bytes,
    channels,
    head_size,
    layer_parts,
    layer_tensors,
    rest_tensors,
    share_of,
    table_tensors,
)
from toolkit.planning.models import kinds_of
from toolkit.planning.strategy import Strategy

SWIGLU_KEPT = 6  # numbers per hidden unit and token that one layer's forward pass keeps
LOGIT_COPIES = 2  # logits and their gradient, float32
# float32 numbers per channel and token in the backward pass of a recurrent layer: chunk states,
# products of decays, inverses and their gradients. Read off Gated DeltaNet programs.
RECURRENT_ARRAYS = 24
FEW = 2  # sequences of a microbatch


class Memory(NamedTuple):
    """Bytes on one chip at the peak of a step.

    Attributes:
        parameters: float32, as stored between steps.
        optimizer: Adam's two moments, float32.
        gradients: float32 for layers, the compute type for tables.
        activations: kept by the forward pass for the backward pass.
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
        """The sum."""
        return sum(self)

    @property
    def arguments(self) -> int:
        """Bytes that a compiled step reports as its arguments."""
        return self.parameters + self.optimizer + self.inputs

    @property
    def temporary(self) -> int:
        """Bytes that a compiled step reports as temporaries."""
        return self.total - self.arguments


class Layer(NamedTuple):
    """The memory of one layer on one chip.

    Attributes:
        share: its parameters.
        kept: bytes for the backward pass, per microbatch in flight.
        gathered: bytes of weights, and of their gradients, while its backward pass runs.
        working: bytes of its intermediates in the backward pass.
    """

    share: Held
    kept: int
    gathered: int
    working: int


def layer_memory(
    config: LoopedConfig,
    word: str,
    fed: str,
    recompute: str,
    strategy: Strategy,
    sequences: int,
    length: int,
) -> Layer:
    """The memory of one layer for a microbatch of `sequences` per chip."""
    size = config.compute_dtype.itemsize
    tokens, tensor = sequences * length // strategy.context // strategy.slices, strategy.tensor
    width, hidden = config.width, 0
    if fed == "swiglu":
        hidden = config.feed_forward_size // tensor
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
    if recompute == "layer":
        kept = stream
    elif word not in SOFTMAX:
        kept = round(tokens * kept_per_token(config, word, fed, recompute, length))
    else:
        kept = stream + (products if recompute == "elementwise" else mixed + SWIGLU_KEPT * unit)
    if strategy.slices > 1:  # the cache with its own tokens, of which each slice has a copy
        kept += sequences * cache_bytes(config, word, tensor, length)
    parts = layer_parts(config, word, fed, strategy)
    own = sum((part.share for part in parts), Held(0, 0, 0))
    routed = (0, 0) if fed == "swiglu" else mixture_memory(config, recompute, strategy, tokens)
    kept += routed[0]
    # The gradients of gate and up, and four of the stream; with "tensor", of all time too.
    shared = 2 * unit + 4 * stream + 4 * whole * (tensor > 1) + routed[1]
    # The halves that are rotated are padded to a TPU's lanes.
    padded = max(1, 2 * LANES // head_size(config, word))
    attention = tokens * (2 * queries + padded * (queries + keys)) * size
    if strategy.context > 1:  # keys and values of all tokens, and their gradients
        attention += 4 * strategy.context * tokens * keys * size
    if LAYERS[word].is_recurrent:
        attention = FLOAT32 * RECURRENT_ARRAYS * tokens * width
    weights = sum(part.itemsize * part.share.used for part in parts)
    if recompute != "layer":  # the backward pass goes through one half of the layer at a time
        gathered = weights if weights + unit > attention else 0
        working = shared + (unit if gathered else attention)
    elif strategy.block_chunks == 1:
        gathered, working = weights, shared + unit + attention
    else:
        # Each part reads the keys and values before it and adds to float32 gradients, of which that
        # of the layer's input exists before and after.
        gathered = weights + FLOAT32 * own.used
        all_keys = tokens * (2 + padded) * keys * size
        working = (shared + unit + attention) // strategy.block_chunks + all_keys + 7 * stream
    return Layer(own, kept, gathered, working)


def memory_of(
    config: LoopedConfig,
    strategy: Strategy,
    batch: int,
    length: int,
    *,
    layers: tuple[tuple[str, str, str], ...] | None = None,
    in_flight: float = 1,
    has_embedding: bool = True,
    has_head: bool = True,
    fuses_logits: bool = False,
) -> Memory:
    """Memory of one chip that holds some layers (None: all), for microbatches in flight.

    With `fuses_logits`, as libtpu has it, the products that read the gradient of a whole head's
    logits make it from these, so that it is no array; XLA for GPUs stores it.
    """
    size = config.compute_dtype.itemsize
    sequences = batch // (strategy.batch_shards * strategy.microbatches)
    words = tuple(layer_kinds(config, strategy)) if layers is None else layers
    found = {kind: layer_memory(config, *kind, strategy, sequences, length) for kind in set(words)}
    body, kept = Held(0, 0, 0), 0
    for word, count in Counter(words).items():
        body += found[word].share.times(count)
        kept += found[word].kept * count * config.loops
    tables = table_tensors(config, strategy.tensor)
    table = share_of(tables[:1], strategy)
    count = len(tables) if has_embedding and has_head else int(has_embedding or has_head)
    numbers = body + table.times(count) + share_of(rest_tensors(config), strategy)
    # Working memory of equal layers depends on what they recompute.
    largest = max(found.values(), key=lambda layer: layer.gathered + layer.working)
    tokens = sequences * length // strategy.context // strategy.slices
    whole = largest.share.kept * strategy.shard_gradients  # of one layer, until they are scattered
    summed, body_summed = numbers.kept, body.kept
    if strategy.shard_gradients:
        summed, body_summed = numbers.moment, body.moment
    accumulated = FLOAT32 * summed * (strategy.parts > 1)
    # A loop's gate keeps the loop's input, and a norm after the loop two float32 arrays.
    stream = tokens * config.width // strategy.tensor
    between = stream * (size * config.residual_gate + 2 * FLOAT32 * config.norm_every_loop)
    loops = config.loops if config.loops > 1 and strategy.pipeline == 1 else 0
    activations = round((kept + loops * between) * in_flight * (1 - strategy.offload))
    # Of two layers, on their way to the host or back.
    moving = round(2 * strategy.offload * max(layer.kept for layer in found.values()))
    logits = FLOAT32 * tokens * -(-config.vocabulary // strategy.tensor) // strategy.head_chunks
    use = size * table.used
    fused = fuses_logits and strategy.head_chunks == 1
    # The gradient of a table lasts until the embedding's is added, and so does the gathered table,
    # unless that is the embedding and layers are computed anew.
    only_gradient = config.tied_embedding and {"layer"} == {kind[2] for kind in words}
    # Layers computed anew for few sequences read the projections of queries, keys and values in
    # another order, which libtpu keeps of all layers in float32.
    reordered = FLOAT32 * sum(
        share_of(layer_tensors(config, word, fed)[:3], strategy).kept * count
        for (word, fed, recompute), count in Counter(words).items()
        if recompute == "layer" and sequences <= FEW and word in SOFTMAX
    )
    moments = (
        # gradients, activations, gathered, working
        (
            accumulated,
            activations,
            reordered + 2 * use,
            (1 if fused else LOGIT_COPIES) * logits + 2 * tokens * config.width * size,
        )
        if has_head
        else (0, 0, 0, 0),
        (
            # The gradients of one loop exist besides their sum, and the activations of the current
            # loop are copied.
            accumulated + FLOAT32 * (body_summed * (2 if loops else 1) + whole) + use * has_head,
            activations + (kept // loops if loops else 0),
            reordered + largest.gathered + (not only_gradient) * use * has_head,
            largest.working + moving,
        ),
        (accumulated + FLOAT32 * summed, 0, use, 0),
    )
    gradients, kept, gathered, working = max(moments, key=sum)
    return Memory(
        parameters=FLOAT32 * numbers.kept,
        optimizer=2 * FLOAT32 * numbers.moment,
        gradients=gradients,
        activations=kept,
        gathered=gathered,
        working=working,
        inputs=2 * FLOAT32 * (batch // strategy.batch_shards) * length // strategy.context,
    )


def layer_kinds(config: LoopedConfig, strategy: Strategy) -> tuple[tuple[str, str, str], ...]:
    """The words of the mixer and the feed-forward layer, and the recomputation, of every layer."""
    kinds = kinds_of(config)
    return _kinds(kinds, strategy.runs(len(kinds)))


@functools.lru_cache(maxsize=1024)
def _kinds(kinds: tuple[tuple[str, str], ...], runs: tuple[tuple[str, int], ...]):
    each = iter(kinds)
    return tuple((*next(each), recompute) for recompute, count in runs for _ in range(count))
