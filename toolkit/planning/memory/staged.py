"""Memory of GPUs on which each device of a pipeline runs a program of its own, with fused kernels.

    peak = 2 N + 12 N / shards + max over time of (activations + 4 N of the stages at work)
           + one layer's intermediates or the logits + NCCL's buffers + CUDA's kernels

Programs of Megatron's kind hold weights in 16 bits, gradients in float32, and a float32 copy with
two moments in shards; N counts the numbers of a device's own stages, and the tables of the first
and the last. Norms, rotations and gates are fused, so that nothing but the inputs of products and
of attention is kept, where JAX keeps float32 arrays of every norm (`categories.py`).

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022,
section 4, without scores that FlashAttention does not store; DeepSeek-AI, "DeepSeek-V3", 2024,
section 3.3.3, for what is kept in float8; Grattafiori et al., "The Llama 3 Herd of Models", 2024,
section 3.3.2, for gradients that are cut.
"""

import itertools
from collections import Counter

from toolkit.looped import LoopedConfig
from toolkit.looped.mixing import LAYERS
from toolkit.planning.memory.categories import (
    LOGIT_COPIES,
    layer_kinds,
    layer_memory,
    memory_of,
)
from toolkit.planning.memory.gpus import COMMUNICATOR, FRAMEWORK, GROUPS, GpuPeak
from toolkit.planning.memory.sizes import FLOAT32, SOFTMAX, channels
from toolkit.planning.models import expert_hidden
from toolkit.planning.strategy import Strategy
from toolkit.planning.time.orders import steps_of


def fused_kept(config: LoopedConfig, word: str, fed: str, recompute: str, strategy: Strategy):
    """Bytes per token that a layer with fused kernels keeps; "elementwise" computes norms, gates
    and the projections from latents anew. In float8, what products and gates read is kept so."""
    size, width, cut = config.compute_dtype.itemsize, config.width, strategy.tensor
    read = 1 if strategy.products != "bfloat16" else size
    if recompute == "layer":
        return size * width / cut
    again = recompute == "elementwise"
    kept = width * (2 * size + (0 if again else 2 * read))  # inputs of both norms, their outputs
    if word in SOFTMAX:
        queries, keys = channels(config, word)
        kept += size * (2 * queries + 2 * keys)
    elif word == "mla":
        own = LAYERS[word].sizes_of(config)
        each = own.key_size + own.rope_size
        kept += size * (own.heads * own.value_size + own.latent_size + own.rope_size)
        kept += size * (own.query_latent_size or 0)
        kept += 0 if again else size * own.heads * (2 * each + own.value_size)
    else:
        raise ValueError(f"model: what fused kernels keep of {word!r} layers is not modelled")
    gated = read * (2 if again else 3)
    if fed == "swiglu":
        return (kept + gated * config.feed_forward_size) / cut
    moe = config.moe
    kept += gated * (moe.shared_hidden or 0) + FLOAT32 * moe.experts
    return (kept + moe.chosen * (read * width + gated * expert_hidden(config))) / cut


def staged_peak(
    config: LoopedConfig, strategy: Strategy, batch: int, length: int, *, scatters: bool = False
) -> GpuPeak:
    """The peak of the device that needs most. With `scatters`, the gradients of a stage are cut
    once its last microbatch has gone backward, and exist whole from its first one to then.

    PyTorch's allocator gives back what it keeps beyond that before it fails.
    """
    kinds = layer_kinds(config, strategy)
    sizes = strategy.layers_by_stage(len(kinds))
    ends = [*itertools.accumulate(sizes)]
    words = [kinds[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    sequences = batch // (strategy.batch_shards * strategy.microbatches)
    tokens = sequences * length // strategy.context // strategy.slices
    kept = {kind: tokens * fused_kept(config, *kind, strategy) for kind in set(kinds)}
    states = [
        memory_of(
            config, strategy, batch, length, layers=mine, has_embedding=stage == 0,
            has_head=stage == len(words) - 1,
        )
        for stage, mine in enumerate(words)
    ]  # fmt: skip
    activations = [sum(kept[kind] for kind in mine) for mine in words]
    gradients = [each.parameters for each in states]  # in float32
    at_once = _at_once(strategy, activations, gradients, scatters)
    found = []
    for device, mine in enumerate(strategy.stages_by_device):
        numbers = sum(states[stage].parameters for stage in mine) // FLOAT32
        moments = sum(states[stage].optimizer for stage in mine) // (2 * FLOAT32)
        layers = {kind for stage in mine for kind in words[stage]}
        working = max(
            layer_memory(config, *kind, strategy, sequences, length).working for kind in layers
        )
        if len(words) - 1 in mine:
            logits = FLOAT32 * tokens * config.vocabulary // strategy.tensor
            working = max(working, LOGIT_COPIES * logits)
        axes = sum(getattr(strategy, name) > 1 for name in GROUPS)
        waiting, summed = at_once[device]
        found.append(
            GpuPeak(
                2 * numbers, round(summed), 3 * FLOAT32 * moments, round(waiting), working, 0,
                axes * COMMUNICATOR, FRAMEWORK,
            )
        )  # fmt: skip
    return max(found, key=lambda peak: peak.total)


def _at_once(
    strategy: Strategy, activations: list[float], gradients: list[int], scatters: bool
) -> list[tuple[float, float]]:
    """For each device, the activations and gradients of the moment at which both need most."""
    whole = [sum(gradients[stage] for stage in mine) for mine in strategy.stages_by_device]
    now = [[0.0, 0.0 if scatters else float(each)] for each in whole]
    most = [(0.0, 0.0)] * strategy.pipeline
    left = Counter(dict.fromkeys(range(strategy.stage_count), strategy.parts))
    for device, task, stage, _, _ in steps_of(strategy):
        mine = now[device]
        if task == "F":
            mine[0] += activations[stage]
        is_first = left[stage] == strategy.parts
        if scatters and task in "BI" and is_first:
            mine[1] += gradients[stage]
        most[device] = max(most[device], (mine[0], mine[1]), key=sum)
        if task in "BW":  # inputs of products wait for the gradients of weights
            mine[0] -= activations[stage]
            left[stage] -= 1
            if scatters and not left[stage]:
                mine[1] -= gradients[stage]
    return most
