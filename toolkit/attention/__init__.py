"""Token mixers as pure functions of arrays.

gated_delta_net            linear-time mixer with decay and error correction, chunked
gated_delta_net_reference  the same, token by token: the equation
"""

from toolkit.attention.gated_delta_net import gated_delta_net, gated_delta_net_reference

__all__ = ["gated_delta_net", "gated_delta_net_reference"]
