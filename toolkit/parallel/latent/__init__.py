"""Latent attention on many devices: placement, decoding, and the prompt before it.

place_slices   place a layer's weights for a scheme
prefill        read a prompt exactly, heads cut over all devices
hand_over      reshard its cache for decoding: by a local slice, or by one all-to-all
decode_step    one token: MLA by heads, TPLA, GLA, MLRA, tokens cut (DCP), or both cut
"""

from toolkit.parallel.latent.decode import decode_step
from toolkit.parallel.latent.handover import hand_over, prefill
from toolkit.parallel.latent.schemes import place_slices

__all__ = ["decode_step", "hand_over", "place_slices", "prefill"]
