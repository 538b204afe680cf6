"""Context parallelism: mixing the tokens of a sequence sharded over several devices.

ring.py        keys and values travel around a ring; a custom backward pass
zigzag.py      an order of chunks in which causal attention costs every device the same
ulysses.py     an all-to-all exchanges sharded time for sharded heads, and back
attention.py   the three on whole arrays
states.py      linear-time mixers: the state passes from device to device
latents.py     latent attention: all latents are gathered
halo.py        layers that look a few tokens back
along.py       whole models under a layout that shards time
"""

from toolkit.parallel.context.attention import context_attention
from toolkit.parallel.context.ring import ring_attention
from toolkit.parallel.context.states import context_mixer
from toolkit.parallel.context.ulysses import ulysses_attention
from toolkit.parallel.context.zigzag import from_zigzag, to_zigzag, zigzag_order

__all__ = [
    "context_attention", "context_mixer", "from_zigzag", "ring_attention", "to_zigzag",
    "ulysses_attention", "zigzag_order",
]  # fmt: skip
