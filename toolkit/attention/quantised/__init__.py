"""Keys and values in fewer than eight bits, beside the quantised `KVCache`.

KiviCache                     keys per channel, values per token, the most recent ones exact (KIVI)
block_floats, from_block_floats   numbers of a block with one exponent (block floating point)
rearranged_channels           an order of the channels in which large ones share their blocks
"""

from toolkit.attention.quantised.block_floats import (
    block_floats,
    from_block_floats,
    rearranged_channels,
)
from toolkit.attention.quantised.kivi import KiviCache

__all__ = ["KiviCache", "block_floats", "from_block_floats", "rearranged_channels"]
