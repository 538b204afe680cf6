"""Looped language models as flax nnx modules, built from `toolkit.attention`.

LoopedConfig              sizes, pattern of layers, number of loops
PRESETS                   LT2's configurations by name, from a laptop's to 1.3B
parameter_count           parameters of a configuration, without allocating any
match_parameters          give one model as many parameters as another
LoopedLM                  the model: tokens -> logits
LAYERS                    every token-mixing layer by its word in a pattern
register_layer            add one of your own
draw_loops                how often to run a model in one step of training
with_loops                the same model run more or less often
exit_probabilities        chances to stop after each loop, of a model with an exit gate
exit_loss                 trains them, with the model
exit_loop                 the loop to stop after
indexer_losses            train the indexers of DSA layers
IndexerLosses             one for each of them in every loop
interleave, bookend, front_loaded, back_loaded, random_placement
                          where the few expensive layers of a pattern go
by_loop                   windows that differ from loop to loop
with_windows              the same model seeing through other windows
rotate_latents            the same model of "mla" layers, their latents in another basis
with_slices               the same model with a softmax per slice of them (TPLA)
vote                      logits averaged over several windows
tokens_reached            how many tokens back a model of windows can know of
influence_bound           and how much it can know of them
effective_transition      what several corrections per token do to a state
permutation_steps         corrections that move the rows of a state as a permutation does
LoopedCache               decode-time state, one cache for every (loop, layer) pair
cache_bytes_per_sequence  size of that state, without allocating it
cache_bytes_per_token     how fast it grows
read_sparsely             let further steps read a part of the keys and values only
sparse_reads              what the last of them read
prefill                   read a prompt in parallel
extend                    read on, a long text piece by piece
decode_step               append one token, predict the next
pad_prompts               prompts of different lengths as one batch
generate                  continue a prompt
stream                    the same, token by token as they are written
generate_speculatively    the same, with the drafts of a cheaper model; a Speculation
truncated_logits          the distribution behind temperature, top-k and top-p
sample_token              draw from it
save_model, load_model    a model as one file
load_layer                give a layer the weights of a published checkpoint
load_checkpoint           make a model of one
"""

from toolkit.looped.checkpoints import load_checkpoint, load_layer
from toolkit.looped.checkpoints.files import load_model, save_model
from toolkit.looped.config import LoopedConfig
from toolkit.looped.decoding.cache import (
    LoopedCache,
    cache_bytes_per_sequence,
    cache_bytes_per_token,
    read_sparsely,
    sparse_reads,
)
from toolkit.looped.decoding.generation import generate, stream
from toolkit.looped.decoding.sampling import sample_token, truncated_logits
from toolkit.looped.decoding.speculative import Speculation, generate_speculatively
from toolkit.looped.decoding.steps import decode_step, extend, pad_prompts, prefill
from toolkit.looped.depth import draw_loops, with_loops
from toolkit.looped.exits import exit_loop, exit_loss, exit_probabilities
from toolkit.looped.indexers import IndexerLosses, indexer_losses
from toolkit.looped.latents import rotate_latents, with_slices
from toolkit.looped.mixing import LAYERS, register_layer
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
from toolkit.looped.theory import (
    effective_transition,
    influence_bound,
    permutation_steps,
    tokens_reached,
)

__all__ = [
    "LAYERS",
    "PRESETS",
    "IndexerLosses",
    "LoopedCache",
    "LoopedConfig",
    "LoopedLM",
    "Speculation",
    "back_loaded",
    "bookend",
    "by_loop",
    "cache_bytes_per_sequence",
    "cache_bytes_per_token",
    "decode_step",
    "draw_loops",
    "effective_transition",
    "exit_loop",
    "exit_loss",
    "exit_probabilities",
    "extend",
    "front_loaded",
    "generate",
    "generate_speculatively",
    "indexer_losses",
    "influence_bound",
    "interleave",
    "load_checkpoint",
    "load_layer",
    "load_model",
    "match_parameters",
    "pad_prompts",
    "parameter_count",
    "permutation_steps",
    "prefill",
    "random_placement",
    "read_sparsely",
    "register_layer",
    "rotate_latents",
    "sample_token",
    "save_model",
    "sparse_reads",
    "stream",
    "tokens_reached",
    "truncated_logits",
    "vote",
    "with_loops",
    "with_slices",
    "with_windows",
]
