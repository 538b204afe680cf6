"""Looped language models as flax nnx modules, built from `toolkit.attention`.

LoopedConfig              sizes, pattern of layers, number of loops
PRESETS                   LT2's configurations by name, from a laptop's to 1.3B
parameter_count           parameters of a configuration, without allocating any
active_parameter_count    those of them that a token passes, in a model with experts
match_parameters          give one model as many parameters as another
flops_per_token           FLOPs of training on one token
match_compute             give one model as many of these as another has
LoopedLM                  the model: tokens -> logits
LAYERS                    every token-mixing layer by its word in a pattern
register_layer            add one of your own
scanned_layers            trace equal layers once
draw_loops                a number of loops for one training step
with_loops                the same model with another number of loops
exit_probabilities        probability of stopping after each loop (exit gate)
exit_loss                 the loss that trains model and exit gate together
exit_loop                 the loop after which to stop
recursion_loss            the loss of a model whose router decides how many loops a token takes
recursion_depths          how many it takes
indexer_losses            the losses that train the indexers of DSA layers
IndexerLosses             these losses, per layer and loop
interleave, bookend, front_loaded, back_loaded, random_placement
                          where the few expensive layers of a pattern go
by_loop                   windows that differ from loop to loop
with_windows              the same model with other attention windows
rotate_latents            the same function, with the latents of "mla" layers in another basis
with_slices               the same model with one softmax per slice of the latents (TPLA)
vote                      logits averaged over several windows
tokens_reached            the receptive field of a model with windows, in tokens
influence_bound           an upper bound on the weight of a distant token
effective_transition      the matrix by which several corrections per token multiply a state
permutation_steps         corrections that permute the rows of a state
LoopedCache               decode-time state, one cache for every (loop, layer) pair
cache_bytes_per_sequence  size of that state, without allocating it
cache_bytes_per_token     bytes that each further token adds to it
read_sparsely             make further steps read only a part of the keys and values
sparse_reads              what the last such step read
prefill                   read a prompt in parallel
extend                    read further tokens, for instance a long text in pieces
decode_step               append one token and predict the next
decode_until_exit         the same, with as many loops as a rule asks for
pad_prompts               prompts of different lengths as one batch
generate                  continue a prompt
stream                    the same, yielding each token as it is sampled
generate_speculatively    the same, with drafts of a cheaper model; returns a Speculation
ParallelLayers            a draft whose layers run in parallel, its cache calibrated (EasySpec)
truncated_logits          the distribution behind temperature, top-k, top-p and min-p
penalised_logits          the penalty on tokens that the text has already
sample_token              draw from it
save_model, load_model    write a model to one file, and read it back
load_layer                fill a layer with the weights of a published checkpoint
load_checkpoint           build a model from a published checkpoint
checkpoint_folder         where it lies: in a folder, or on the Hugging Face Hub
save_checkpoint           write one that Hugging Face transformers reads
"""

from toolkit.looped.checkpoints import (
    checkpoint_folder,
    load_checkpoint,
    load_layer,
    save_checkpoint,
)
from toolkit.looped.checkpoints.files import load_model, save_model
from toolkit.looped.config import LoopedConfig
from toolkit.looped.decoding.cache import (
    LoopedCache,
    cache_bytes_per_sequence,
    cache_bytes_per_token,
    read_sparsely,
    sparse_reads,
)
from toolkit.looped.decoding.early_exit import decode_until_exit
from toolkit.looped.decoding.generation import generate, stream
from toolkit.looped.decoding.layer_parallel import ParallelLayers
from toolkit.looped.decoding.sampling import penalised_logits, sample_token, truncated_logits
from toolkit.looped.decoding.speculative import Speculation, generate_speculatively
from toolkit.looped.decoding.steps import decode_step, extend, pad_prompts, prefill
from toolkit.looped.indexers import IndexerLosses, indexer_losses
from toolkit.looped.latents import rotate_latents, with_slices
from toolkit.looped.loops.depth import draw_loops, with_loops
from toolkit.looped.loops.exits import exit_loop, exit_loss, exit_probabilities
from toolkit.looped.mixing import LAYERS, register_layer
from toolkit.looped.model import LoopedLM
from toolkit.looped.parameters import (
    active_parameter_count,
    flops_per_token,
    match_compute,
    match_parameters,
    parameter_count,
)
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
from toolkit.looped.recursion.loss import recursion_depths, recursion_loss
from toolkit.looped.scanned import scanned_layers
from toolkit.looped.theory import (
    effective_transition,
    influence_bound,
    permutation_steps,
    tokens_reached,
)

__all__ = [
    "LAYERS", "PRESETS", "IndexerLosses", "LoopedCache", "LoopedConfig", "LoopedLM",
    "ParallelLayers", "Speculation", "active_parameter_count", "back_loaded", "bookend", "by_loop",
    "cache_bytes_per_sequence", "cache_bytes_per_token", "checkpoint_folder", "decode_step",
    "decode_until_exit", "draw_loops", "effective_transition", "exit_loop", "exit_loss",
    "exit_probabilities", "extend", "flops_per_token", "front_loaded", "generate",
    "generate_speculatively", "indexer_losses", "influence_bound", "interleave", "load_checkpoint",
    "load_layer", "load_model", "match_compute", "match_parameters", "pad_prompts",
    "parameter_count", "penalised_logits", "permutation_steps", "prefill", "random_placement",
    "read_sparsely", "recursion_depths", "recursion_loss", "register_layer", "rotate_latents",
    "sample_token", "save_checkpoint", "save_model", "scanned_layers", "sparse_reads", "stream",
    "tokens_reached", "truncated_logits", "vote", "with_loops", "with_slices", "with_windows",
]  # fmt: skip
