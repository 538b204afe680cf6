"""Looped language models as flax nnx modules, built from `toolkit.attention`.

LoopedConfig              sizes, pattern of layers, number of loops
PRESETS                   LT2's configurations by name, from a laptop's to 1.3B
parameter_count           parameters of a configuration, without allocating any
match_parameters          give one model as many parameters as another
LoopedLM                  the model: tokens -> logits
LAYERS                    every token-mixing layer by its word in a pattern
exit_probabilities        chances to stop after each loop, of a model with an exit gate
exit_loss                 trains them, with the model
exit_loop                 the loop to stop after
interleave, bookend, front_loaded, back_loaded, random_placement
                          where the few expensive layers of a pattern go
by_loop                   windows that differ from loop to loop
with_windows              the same model seeing through other windows
vote                      logits averaged over several windows
tokens_reached            how many tokens back a model of windows can know of
influence_bound           and how much it can know of them
effective_transition      what several corrections a token do to a state
permutation_steps         corrections that move the rows of a state as a permutation does
LoopedCache               decode-time state, one cache for every (loop, layer) pair
cache_bytes_per_sequence  size of that state, without allocating it
prefill                   read a prompt in parallel
decode_step               append one token, predict the next
generate                  continue a prompt
stream                    the same, token by token as they are written
truncated_logits          the distribution behind temperature, top-k and top-p
sample_token              draw from it
save_model, load_model    a model as one file
load_layer                give a layer the weights of a published checkpoint
"""

from toolkit.looped.cache import LoopedCache, cache_bytes_per_sequence
from toolkit.looped.config import LoopedConfig
from toolkit.looped.exits import exit_loop, exit_loss, exit_probabilities
from toolkit.looped.files import load_model, save_model
from toolkit.looped.generation import decode_step, generate, prefill, stream
from toolkit.looped.mixing import LAYERS
from toolkit.looped.model import LoopedLM
from toolkit.looped.parameters import match_parameters, parameter_count
from toolkit.looped.patterns import (
    back_loaded,
    bookend,
    by_loop,
    front_loaded,
    interleave,
    random_placement,
    vote,
    with_windows,
)
from toolkit.looped.presets import PRESETS
from toolkit.looped.sampling import sample_token, truncated_logits
from toolkit.looped.theory import (
    effective_transition,
    influence_bound,
    permutation_steps,
    tokens_reached,
)
from toolkit.looped.weights import load_layer

__all__ = [
    "LAYERS",
    "PRESETS",
    "LoopedCache",
    "LoopedConfig",
    "LoopedLM",
    "back_loaded",
    "bookend",
    "by_loop",
    "cache_bytes_per_sequence",
    "decode_step",
    "effective_transition",
    "exit_loop",
    "exit_loss",
    "exit_probabilities",
    "front_loaded",
    "generate",
    "influence_bound",
    "interleave",
    "load_layer",
    "load_model",
    "match_parameters",
    "parameter_count",
    "permutation_steps",
    "prefill",
    "random_placement",
    "sample_token",
    "save_model",
    "stream",
    "tokens_reached",
    "truncated_logits",
    "vote",
    "with_windows",
]
