"""Looped language models as flax nnx modules, built from `toolkit.attention`.

LoopedConfig              sizes, pattern of layers, number of loops
parameter_count           parameters of a configuration, without allocating any
match_parameters          give one model as many parameters as another
LoopedLM                  the model: tokens -> logits
LAYERS                    every token-mixing layer by its word in a pattern
LoopedCache               decode-time state, one cache for every (loop, layer) pair
cache_bytes_per_sequence  size of that state, without allocating it
prefill                   read a prompt in parallel
decode_step               append one token, predict the next
generate                  continue a prompt
stream                    the same, token by token as they are written
truncated_logits          the distribution behind temperature, top-k and top-p
sample_token              draw from it
load_layer                give a layer the weights of a published checkpoint
"""

from toolkit.looped.cache import LoopedCache, cache_bytes_per_sequence
from toolkit.looped.config import LoopedConfig
from toolkit.looped.generation import decode_step, generate, prefill, stream
from toolkit.looped.mixing import LAYERS
from toolkit.looped.model import LoopedLM
from toolkit.looped.parameters import match_parameters, parameter_count
from toolkit.looped.sampling import sample_token, truncated_logits
from toolkit.looped.weights import load_layer

__all__ = [
    "LAYERS",
    "LoopedCache",
    "LoopedConfig",
    "LoopedLM",
    "cache_bytes_per_sequence",
    "decode_step",
    "generate",
    "load_layer",
    "match_parameters",
    "parameter_count",
    "prefill",
    "sample_token",
    "stream",
    "truncated_logits",
]
