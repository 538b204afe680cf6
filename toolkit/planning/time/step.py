"""The time of a step by part, modelled from published rates and the achieved share of them.

A layer's forward pass takes

    FLOPs of products / matmul + FLOPs of attention / attention + bytes / elementwise + launch

each at the chip's rate: products of small matrices, and small microbatches, are slower because
their bytes and their starts take a larger part, and on GPUs the last wave of tiles (`products`).

Source: Austin et al., How to Scale Your Model, 2025 (rooflines); Hetu-Galvatron's cost model for
communication that hides behind the backward pass.
"""

import functools

from toolkit.looped import LoopedConfig
from toolkit.looped.mixing import LAYERS
from toolkit.looped.parameters import mixing_flops
from toolkit.measure import Link
from toolkit.planning.clusters import Cluster
from toolkit.planning.memory.categories import layer_memory
from toolkit.planning.memory.sizes import (
    FLOAT32,
    Held,
    Part,
    channels,
    head_size,
    layer_parts,
    rest_tensors,
    share_of,
    table_tensors,
)
from toolkit.planning.mixtures import held_rows, routed_rows
from toolkit.planning.models import expert_hidden
from toolkit.planning.strategy import Strategy
from toolkit.planning.time.products import ALIGNMENT, UNALIGNED, product_rate, waves
from toolkit.planning.time.seconds import KERNELS, Constants, Seconds
from toolkit.planning.time.traffic import (
    Transfer,
    as_compiled,
    layer_transfers,
    table_transfers,
)

# How often a forward pass reads or writes an array: the float32 logits; and the scores of attention
# that stores them (products, mask, softmax and weights).
LOGIT_PASSES, SCORE_PASSES = 3, 6
# Schedules that run a microbatch's forward beside another's backward pass, so that the tokens of
# one travel to their experts while the other computes.
HIDING = ("dualpipe-v",)
# Whose communication computing waits for.
WAITS = {"tensor": "tensor ", "context": "tensor ", "expert": "expert "}
# Of it, what kernels of their own carry where a program hides it. The rest is slowed as
# communication of parameters is, by torchtitan's steps with and without.
BESIDE = {"expert": "expert", "tensor": "tensor-buffers"}


_mixing_flops = functools.lru_cache(maxsize=1024)(mixing_flops)


def layer_seconds(
    config: LoopedConfig,
    word: str,
    fed: str,
    recompute: str,
    strategy: Strategy,
    cluster: Cluster,
    sequences: int,
    length: int,
    constants: Constants,
) -> Seconds:
    """One layer, over all microbatches and loops of a step."""
    parts = layer_parts(config, word, fed, strategy)
    tokens = sequences * length // strategy.context // strategy.slices
    runs = strategy.parts * config.loops
    mixing = tokens * _mixing_flops(word, config, length, whole=True) / strategy.tensor
    mixing *= _multiplied(config, word, strategy, length)
    chip, is_old = cluster.chip, constants.attention_kernels == "stored"
    products, routed = 2 * tokens * parts[0].share.used, 0.0
    products *= waves(config, word, fed, strategy.tensor, tokens, chip.name)
    if fed == "moe":
        routed = _routed_seconds(config, strategy, cluster, tokens, constants, parts[1])
        own = tokens / strategy.tensor if strategy.expert > 1 else tokens
        products += 2 * own * sum(part.share.used for part in parts[2:])
    moved = config.compute_dtype.itemsize * parts[0].share.used
    moved += layer_bytes(config, word, fed, strategy, tokens, is_old=is_old)
    if is_old and word in ("full", "window"):
        # Of all keys.
        mixing = 4 * tokens * length * channels(config, word)[0] / strategy.tensor
        mixing *= UNALIGNED if head_size(config, word) % ALIGNMENT else 1
        heads = config.heads / strategy.tensor
        moved += SCORE_PASSES * config.compute_dtype.itemsize * tokens * length * heads
    if strategy.products != "bfloat16":
        moved += cast_bytes(config, word, fed, strategy, tokens)
    products /= product_rate(chip, strategy.products) * constants.matmul
    faster = KERNELS[constants.attention_kernels]
    mixing /= chip.flops_per_second * min(1.0, constants.attention * faster)
    moved /= chip.bytes_per_second * constants.elementwise
    whole = products + mixing + moved + routed + constants.launch
    # The products of experts have a batch, and such are not kept by JAX.
    cheap = mixing + moved + (0.0 if strategy.keeps_products else routed)
    anew = {"none": 0, "elementwise": cheap, "layer": whole}[recompute]
    forward, again = runs * max(constants.host, whole), runs * anew
    backward = 2 * whole
    if not is_old:  # computes the scores anew: five products, and two forward
        backward += mixing / 2
    backward = runs * max(2 * constants.host, backward)
    if recompute == "layer" and strategy.block_chunks > 1:
        again += runs * _streaming_seconds(config, word, strategy, cluster, tokens, constants)
    transfers = layer_transfers(config, word, fed, recompute, strategy, sequences, length, cluster)
    # A layer that is computed anew in JAX makes all its gradients at once.
    is_split = recompute == "none" or strategy.keeps_products
    later = runs * (products + routed) if is_split else 0.0
    seconds = Seconds(forward, backward, again, weight_gradient=later)
    hidden = strategy.overlapped + "expert" * (strategy.schedule in HIDING)
    seconds += _communication(
        as_compiled(transfers, cluster, sequences), cluster, constants, hidden
    )
    if strategy.offload:
        kept = layer_memory(config, word, fed, recompute, strategy, sequences, length).kept
        moving = runs * strategy.offload * kept / constants.host_link
        seconds += Seconds(hidden_forward=moving, hidden_backward=moving)
    for part in parts:
        seconds += _update(part.share, cluster, constants)
    return seconds


def _multiplied(config: LoopedConfig, word: str, strategy: Strategy, length: int) -> float:
    """Keys with which the program multiplies a slice's queries over those that they see: it has all
    keys of the cache."""
    if strategy.slices == 1 or LAYERS[word].is_recurrent:
        return 1.0
    window = LAYERS[word].window_of(config)
    return 1 + length / strategy.slices / window if window and window < length else 2.0


def layer_bytes(
    config: LoopedConfig, word: str, fed: str, strategy: Strategy, tokens: int, *, is_old: bool
) -> float:
    """Bytes that a layer's forward pass reads and writes, other than weights and experts' rows.

    Per token: norms and sums of the residual stream, 10 times its width; rotations and SwiGLU; what
    products write.
    """
    width, tensor = config.width, strategy.tensor
    queries, keys = channels(config, word)
    hidden = config.feed_forward_size if fed == "swiglu" else 0
    stream = 10 * width / (1 if is_old else tensor)
    inner = (3 * queries + 4 * keys + 5 * hidden) / tensor
    return config.compute_dtype.itemsize * tokens * (stream + inner + 2 * width)


def cast_bytes(config: LoopedConfig, word: str, fed: str, strategy: Strategy, tokens: int) -> float:
    """Bytes read and written to cast the inputs of a layer's products to float8, and its weights:
    once as they are and once transposed, for the products of the backward pass. All microbatches
    use the same cast weights. Rows that reach their experts in float8 are only transposed
    (DeepSeek-V3, 2024, sections 3.3.3 and 3.5.2)."""
    queries, itemsize = channels(config, word)[0] / strategy.tensor, config.compute_dtype.itemsize
    hidden = config.feed_forward_size / strategy.tensor if fed == "swiglu" else 0
    numbers = tokens * (2 * config.width + queries + hidden)
    numbers += layer_parts(config, word, fed, strategy)[0].share.used / strategy.parts
    if fed != "moe":
        return numbers * (itemsize + 2)
    is_folded = strategy.expert > 1
    rows = routed_rows(config, strategy, tokens // strategy.tensor if is_folded else tokens)
    numbers += rows * expert_hidden(config) / (1 if is_folded else strategy.tensor)
    arriving = 2 if strategy.dispatch == "by_host" else itemsize + 2
    return numbers * (itemsize + 2) + rows * config.width * arriving


def _routed_seconds(
    config: LoopedConfig,
    strategy: Strategy,
    cluster: Cluster,
    tokens: int,
    constants: Constants,
    experts: Part,
) -> float:
    """Seconds of the busiest chip's experts, forward, for `tokens` of each group of "tensor": the
    products, or the time to read the weights if each expert has few rows."""
    is_folded = strategy.expert > 1
    own = tokens // strategy.tensor if is_folded else tokens
    rows: float = routed_rows(config, strategy, own)
    if is_folded and strategy.dispatch != "all_to_all":
        # All others wait for the busiest. The kernel for TPUs multiplies rows of others too.
        is_tpu = cluster.chip.name.startswith("TPU")
        rows = held_rows(config, strategy, own) if is_tpu else rows * constants.imbalance
    hidden = expert_hidden(config) / (1 if is_folded else strategy.tensor)
    flops, read = 6 * rows * config.width * hidden, experts.itemsize * experts.share.used
    moved = config.compute_dtype.itemsize * rows * (5 * hidden + 4 * config.width)
    chip = cluster.chip
    return moved / (chip.bytes_per_second * constants.elementwise) + max(
        flops / (product_rate(chip, strategy.products) * constants.matmul * constants.grouped),
        read / (chip.bytes_per_second * constants.memory),
    )


def _streaming_seconds(
    config: LoopedConfig,
    word: str,
    strategy: Strategy,
    cluster: Cluster,
    tokens: int,
    constants: Constants,
) -> float:
    """Extra seconds of chunked layers: each chunk projects all earlier keys and values again
    (forward, recomputation and twice backward) and adds its gradients to float32 sums."""
    keys = channels(config, word)[1] if word in ("full", "window") else 0
    times = (strategy.block_chunks - 1) / 2
    flops = 4 * times * 2 * tokens * config.width * 2 * keys
    used = layer_parts(config, word, "swiglu", strategy)[0].share.used
    moved = strategy.block_chunks * used * (config.compute_dtype.itemsize + 2 * FLOAT32)
    return flops / (cluster.chip.flops_per_second * constants.matmul) + moved / (
        cluster.chip.bytes_per_second * constants.memory
    )


def table_seconds(
    config: LoopedConfig,
    strategy: Strategy,
    cluster: Cluster,
    sequences: int,
    length: int,
    constants: Constants,
) -> Seconds:
    """Embedding, final norm and head, over all microbatches of a step."""
    tables = table_tensors(config, strategy.tensor)
    found = share_of((*tables, *rest_tensors(config)), strategy)
    used = share_of(tables[:1], strategy).used
    tokens = sequences * length // strategy.context * strategy.microbatches  # of all slices
    forward = 2 * tokens * used / (cluster.chip.flops_per_second * constants.matmul)
    logits = FLOAT32 * tokens * -(-config.vocabulary // strategy.tensor)
    forward += LOGIT_PASSES * logits / (cluster.chip.bytes_per_second * constants.elementwise)
    anew = forward if strategy.head_chunks > 1 else 0.0
    transfers = table_transfers(config, strategy, sequences, length)
    return (
        Seconds(forward, 2 * forward, anew)
        + _communication(as_compiled(transfers, cluster, sequences), cluster, constants)
        + _update(found, cluster, constants)
    )


def transfer_seconds(link: Link, sent: float, degree: int, constants: Constants) -> float:
    """A collective among `degree` chips: a delay per other chip, and the bytes."""
    delay = link.seconds * constants.latency * (degree - 1)
    return delay + sent / (link.bytes_per_second * constants.link)


def _communication(
    transfers: list[Transfer], cluster: Cluster, constants: Constants, hidden: str = ""
) -> Seconds:
    parts: dict[str, float] = dict.fromkeys(
        (
            "tensor forward", "tensor backward", "expert forward", "expert backward", "forward",
            "backward", "update", "beside forward", "beside backward",
        ),
        0.0,
    )  # fmt: skip
    for each in transfers:
        link = cluster.link(each.inner, each.degree, each.kind)
        busiest = constants.imbalance if each.kind == "ragged-all-to-all" else 1.0
        seconds_each = transfer_seconds(link, busiest * each.bytes_sent, each.degree, constants)
        waits = WAITS.get(each.part, "")
        if waits and each.part in hidden:
            waits = "beside " if BESIDE.get(each.part, "?") in hidden else ""
        parts[waits + each.phase] += seconds_each * each.runs
    return Seconds(
        tensor_forward=parts["tensor forward"],
        tensor_backward=parts["tensor backward"],
        hidden_forward=parts["forward"],
        hidden_backward=parts["backward"],
        update=parts["update"],
        expert_forward=parts["expert forward"],
        expert_backward=parts["expert backward"],
        beside_forward=parts["beside forward"],
        beside_backward=parts["beside backward"],
    )


def _update(found: Held, cluster: Cluster, constants: Constants) -> Seconds:
    """Adam reads and writes a parameter and two moments, and reads a gradient."""
    moved = FLOAT32 * (3 * found.moment + 4 * found.moment)
    return Seconds(update=moved / (cluster.chip.bytes_per_second * constants.memory))
