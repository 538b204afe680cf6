"""Token mixers as pure functions of arrays: one call for a sequence, one step for decoding.

Softmax attention, full, grouped or windowed (`softmax.py`, `blockwise.py`, `cache.py`)
    softmax_attention            attend over a sequence; into a cache when given one
    softmax_attention_reference  the same as the bare equation
    softmax_attention_step       decode one token against a cache
    KVCache                      the keys and values of earlier tokens, time last

Gated DeltaNet, a decaying and self-correcting state (`gated_delta_net.py`, `chunked_delta.py`)
    gated_delta_net              mix a sequence in linear time, in chunks
    gated_delta_net_reference    the same, token by token
    gated_delta_net_step         decode one token: read and write the state once
    unit_lower_inverse           inverse of I + A, the delta rule's inner solve (`inverse.py`)

Fading memories, whose state decays and adds up (`fading_memory.py`, `chunked_decay.py`), each with
a `_reference` and a `_step` (linear_attention_reference, linear_attention_step,
retention_reference, retention_step, mamba2_reference, mamba2_step, hgrn2_reference, hgrn2_step,
gated_linear_attention_reference, gated_linear_attention_step)
    linear_attention             no decay: the sum of all keys and values
    retention                    a constant decay in every head
    retention_log_decay          those constants
    mamba2                       one decay a head and token, tied to the input's time step
    gated_linear_attention       one decay a key channel and token
    hgrn2                        likewise, and keys of what the decay lets go

Every mixer once, with what it costs (`mixers.py`)
    MIXERS                       name -> row; iterated over by the tests, looked up by the rest
    Mixer                        a row: functions, options, FLOPs, bytes, paper
    mixer                        look a row up, with other options if wanted
"""

from toolkit.attention.cache import KVCache, softmax_attention_step
from toolkit.attention.gated_delta_net import (
    gated_delta_net,
    gated_delta_net_reference,
    gated_delta_net_step,
)
from toolkit.attention.gated_linear_attention import (
    gated_linear_attention,
    gated_linear_attention_reference,
    gated_linear_attention_step,
)
from toolkit.attention.hgrn2 import hgrn2, hgrn2_reference, hgrn2_step
from toolkit.attention.inverse import unit_lower_inverse
from toolkit.attention.linear_attention import (
    linear_attention,
    linear_attention_reference,
    linear_attention_step,
)
from toolkit.attention.mamba2 import mamba2, mamba2_reference, mamba2_step
from toolkit.attention.mixers import MIXERS, Mixer, mixer
from toolkit.attention.retention import (
    retention,
    retention_log_decay,
    retention_reference,
    retention_step,
)
from toolkit.attention.softmax import softmax_attention, softmax_attention_reference

__all__ = [
    "MIXERS",
    "KVCache",
    "Mixer",
    "gated_delta_net",
    "gated_delta_net_reference",
    "gated_delta_net_step",
    "gated_linear_attention",
    "gated_linear_attention_reference",
    "gated_linear_attention_step",
    "hgrn2",
    "hgrn2_reference",
    "hgrn2_step",
    "linear_attention",
    "linear_attention_reference",
    "linear_attention_step",
    "mamba2",
    "mamba2_reference",
    "mamba2_step",
    "mixer",
    "retention",
    "retention_log_decay",
    "retention_reference",
    "retention_step",
    "softmax_attention",
    "softmax_attention_reference",
    "softmax_attention_step",
    "unit_lower_inverse",
]
