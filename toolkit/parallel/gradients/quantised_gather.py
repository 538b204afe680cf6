"""ZeRO++: weights are gathered, and their gradients scattered, in few bits."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from toolkit.parallel.axes import axes_of
from toolkit.parallel.gradients.buffers import Leaf, cut_rows
from toolkit.parallel.gradients.compression.messages import Messages
from toolkit.parallel.gradients.exchange import Exchange
from toolkit.parallel.gradients.patterns import PATTERNS
from toolkit.parallel.gradients.peers import Along, Peers

GATHER = "linear_call"
"""The primitive of `quantised_gather`, which a rematerialisation policy may name."""


def quantised_gather(
    shard: Array, spec: PartitionSpec, key: Array, exchange: Exchange, along: Along
) -> Array:
    """Gather a shard along its axes; the derivative scatters the sum of the cotangents.

        forward:   w = decode(all_gather(encode(w_d)))                  exchange.weights (qwZ)
        backward:  dw_d = D scatter(dw), the pattern's first half       exchange.compressor (qgZ)

    The rounding of the forward pass has no derivative of its own: only the copy in use is rounded,
    and the optimiser sees neither it nor a rounded master.

    `spec` says along which mesh axes each dimension is cut, all of them in `along`. A device sends
    (D - 1) c_w(n / D) forward and the pattern's first half backward (Wang et al., ZeRO++, 2023,
    sections 3.1 and 3.3).
    """
    cuts = tuple((at, axes) for at, axes in enumerate(axes_of(spec)) if axes)
    whole = list(shard.shape)
    for dimension, axes in cuts:
        whole[dimension] *= along.devices(axes)
    leaf = Leaf(0, tuple(whole), shard.dtype, along.peers.axes, cuts, (), exchange)

    def forward(key: Array, shard: Array) -> Array:
        for dimension, axes in cuts:
            peers = Peers(axes, along.devices(axes))
            if exchange.of_weights is None:
                parts = peers.all_gather(shard)
            else:
                messages = Messages(exchange.of_weights, None, key, along.index())
                payload = peers.all_gather(messages.encode(shard.reshape(1, -1)))
                flat = jax.tree.map(lambda x: x[:, 0], payload)
                parts = messages.decode(flat, shard.size).reshape(peers.size, *shard.shape)
            parts = jnp.moveaxis(parts, 0, dimension)
            shape = list(shard.shape)
            shape[dimension] *= peers.size
            shard = parts.reshape(shape).astype(shard.dtype)
        return shard

    def backward(key: Array, cotangent: Array) -> Array:
        messages = Messages(exchange.of_gradients, None, jax.random.fold_in(key, 1), along.index())
        rows = cut_rows(cotangent.astype(jnp.float32), leaf, along)
        how = exchange.how.scatter or PATTERNS["scatter_gather"].scatter
        assert how is not None
        total = along.peers.size * how(rows, along, messages)
        return total.reshape(shard.shape).astype(shard.dtype)

    return jax.custom_derivatives.linear_call(forward, backward, key, shard)
