"""One chip's part of the loss inside `jax.shard_map`, with its communication.

The residual stream is sharded along time. It is gathered before each half of a layer, whose partial
sums are reduce-scattered (Korthikanti et al., 2022); parameters are gathered over "fsdp" for use,
and again in the backward pass. Tokens go to the chips of their experts and back.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from toolkit.looped.feed_forward.mixture import MixtureLayer
from toolkit.looped.mixing.streaming import streaming
from toolkit.parallel.axes import axes_of
from toolkit.planning.memory.kept import POLICIES
from toolkit.planning.memory.placing import is_of
from toolkit.planning.mixtures import mix_folded
from toolkit.planning.models import group_runs


def local_loss(config, strategy, graphs, specs, params, inputs, targets):
    """Sum over this chip's tokens of the cross-entropy, over all tokens of the batch."""
    dtype = config.compute_dtype
    tables = {
        name: _used(params[name], specs[name], dtype)
        for name in ("embedding", "unembedding")
        if name in params
    }
    h = _embed(tables["embedding"], inputs, strategy.tensor)

    runs = group_runs(config, strategy)

    def group(recompute, graphs, specs, h, layers):
        # Layer by layer: recomputing a group as a whole would hold the activations of all its
        # layers. What
        # is computed anew waits for its gradient, so that neither loops nor layers do it early.
        is_held = config.loops > 1 or len(graphs) > 1
        for graph, layer, spec in zip(graphs, layers, specs, strict=True):
            run = functools.partial(through, config, strategy, recompute, graph, spec)
            run = jax.checkpoint(run, policy=POLICIES[recompute], prevent_cse=is_held)
            h, _ = run(h, layer)
        return h, None

    def loop(h, rho):
        out = h
        given = graphs, params["blocks"], specs["blocks"]
        for (_, recompute, _), *run, blocks, spec in zip(runs, *given, strict=True):
            out, _ = lax.scan(functools.partial(group, recompute, *run, spec), out, blocks)
        return after_loop(config, params["norm"], rho, h, out), None

    if config.loops == 1:
        h, _ = loop(h, params["rho"][0] if config.residual_gate else None)
    else:
        h, _ = lax.scan(loop, h, params.get("rho"), length=config.loops)
    h = h if config.norm_every_loop else _norm(h, params["norm"], config)
    # A tied table is used twice: it is gathered once, and its gradients are summed before they are
    # sent.
    table = tables["embedding" if config.tied_embedding else "unembedding"]
    shards = strategy.batch_shards * strategy.microbatches
    return _cross_entropy(config, strategy, table, h, targets) / (targets.size * shards)


def after_loop(config, norm, rho, start, out):
    """What a loop that began with `start` passes on."""
    out = out if rho is None else out + rho.astype(config.compute_dtype) * start
    return _norm(out, norm, config) if config.norm_every_loop else out


def through(config, strategy, recompute, graph, spec, h, layer, cache=None):
    """One layer, whose parameters are gathered for it, and its cache if there is one; `spec` is
    that of stacked layers."""
    if config.loops > 1 and strategy.pipeline == 1:
        # Otherwise compilers gather the loops' parameters before the first loop and keep them.
        h, layer = lax.optimization_barrier((h, layer))
    block = _gathered(graph, config.compute_dtype, spec, layer)
    if recompute == "layer" and strategy.block_chunks > 1:
        with streaming(strategy.block_chunks, config):
            return block(h)
    return _layer(block, strategy, h, cache)


def embedded(config, strategy, spec, table, inputs):
    """The first activation, from this chip's shard of the embedding."""
    return _embed(_used(table, spec, config.compute_dtype), inputs, strategy.tensor)


def loss_after(config, strategy, specs, shared, h, targets):
    """The loss of `local_loss` from what the last loop passes on."""
    dtype = config.compute_dtype
    h = h if config.norm_every_loop else _norm(h, shared["norm"], config)
    name = "embedding" if config.tied_embedding else "unembedding"
    shards = strategy.batch_shards * strategy.parts
    table = _used(shared[name], specs[name], dtype)
    return _cross_entropy(config, strategy, table, h, targets) / (targets.size * shards)


def _gathered(graph, dtype, spec, layer):
    # The spec of a stacked tensor, without the axis that the scan has consumed.
    def used_of(keys, shard, spec):
        kind = shard.dtype if is_of(keys, "router") else dtype  # routers stay float32
        return _used(shard, PartitionSpec(*spec[1:]), kind)

    used = jax.tree_util.tree_map_with_path(used_of, layer, spec)
    structure, state = graph
    nnx.replace_by_pure_dict(state, used)
    return nnx.merge(structure, state)


def _layer(block, strategy, h, cache):
    def half(norm, mix):
        out, cache = mix(_whole_time(norm(h), strategy.tensor))
        return _scattered(out, strategy.tensor), cache

    mixed, cache = half(block.mixer_norm, lambda x: block.mixer(x, cache=cache))
    h += mixed
    if strategy.expert > 1 and isinstance(block.feed_forward, MixtureLayer):
        # Folded: each chip routes its own tokens, so time is not gathered and nothing is summed.
        return h + mix_folded(block.feed_forward, strategy, block.feed_forward_norm(h)), cache
    fed, _ = half(block.feed_forward_norm, lambda x: (block.feed_forward(x), None))
    return h + fed, cache


def _used(shard, spec, dtype):
    """A parameter ready for use: matrices in the compute type, gathered over "fsdp"."""
    value = shard.astype(dtype) if shard.ndim >= 2 else shard
    for dimension, axes in enumerate(axes_of(spec)):
        if axes == ("fsdp",):  # with others they cut the number of experts
            value = lax.all_gather(value, "fsdp", axis=dimension, tiled=True)
    return value


def _whole_time(h, tensor):
    return h if tensor == 1 else lax.all_gather(h, "tensor", axis=1, tiled=True)


def _scattered(partial, tensor):
    if tensor == 1:
        return partial
    return lax.psum_scatter(partial, "tensor", scatter_dimension=1, tiled=True)


def _embed(table, tokens, tensor):
    if tensor == 1:
        return table[tokens]
    own = tokens - lax.axis_index("tensor") * table.shape[0]
    is_own = (own >= 0) & (own < table.shape[0])
    rows = jnp.where(is_own[..., None], table[jnp.where(is_own, own, 0)], 0)
    return _scattered(rows, tensor)


def _wide(dtype):
    """float32, or float64 for that."""
    return jnp.promote_types(dtype, jnp.float32)


def _norm(h, scale, config):
    wide = h.astype(_wide(h.dtype))
    square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    scaled = wide * lax.rsqrt(square + config.norm_epsilon) * scale
    return scaled.astype(h.dtype)


def _cross_entropy(config, strategy, table, h, targets):
    """Summed cross-entropy with the vocabulary sharded over "tensor"; logits exist chunk by
    chunk."""
    h = _whole_time(h, strategy.tensor)
    vocabulary = table.shape[0]
    start = lax.axis_index("tensor") * vocabulary
    whole = _sum_of_shares if strategy.tensor > 1 else lambda x: x

    def chunk(total, part):
        h, targets = part
        logits = jnp.einsum("btd,vd->btv", h, table, preferred_element_type=_wide(h.dtype))
        rows = start + jnp.arange(vocabulary)
        logits = jnp.where(rows < config.vocabulary, logits, -jnp.inf)
        largest = lax.stop_gradient(logits.max(-1))
        largest = lax.pmax(largest, "tensor") if strategy.tensor > 1 else largest
        mass = whole(jnp.exp(logits - largest[..., None]).sum(-1))
        own = jnp.where(rows == targets[..., None], logits, 0).sum(-1)
        return total + (jnp.log(mass) + largest - whole(own)).sum(), None

    def parts(x):
        return x.reshape(x.shape[0], strategy.head_chunks, -1, *x.shape[2:]).swapaxes(0, 1)

    zero = jnp.zeros((), _wide(h.dtype))
    if strategy.head_chunks == 1:
        return chunk(zero, (h, targets))[0]
    chunked = jax.checkpoint(chunk, prevent_cse=False)
    return lax.scan(chunked, zero, (parts(h), parts(targets)))[0]


@jax.custom_vjp
def _sum_of_shares(x):
    """A sum over "tensor" whose result all chips use alike, so that its gradient passes
    unchanged."""
    return lax.psum(x, "tensor")


_sum_of_shares.defvjp(lambda x: (_sum_of_shares(x), None), lambda _, g: (g,))
