"""Training for any loss function over any pytree of parameters.

Data (text as bytes; a batch is a function of seed and step)
* `load_corpus`: "prose" and "code" that ship with Python, or your own files
* `Corpus`, `CorpusFile`: the bytes, their split, and the record of where they came from
* `CorpusError`: a text cannot be used
* `sample_batch`: random windows for a step, drawn on the device
* `evaluation_batches`: fixed held-out windows
* `BYTE_VOCABULARY`: 256
* `load_tokens`: a token array on disk
* `token_batches`: windows of a token array on disk; every host reads its own, as `HostBatches`
* `record_batches`: the same for records of any random-access source, such as grain's
* `pack_documents`: whole documents in rows of one length, with their segment ids
* `TokenWindows`: the windows of a token array, each once per epoch, as such a source
* `mix_sources`: several sources as one, in stated proportions; returns `MixedSources`
* `HostBatches`: batches read during training, in an order independent of the hosts

Data that training chooses (as in DataFlex)
* `AdaptiveBatches`: records or proportions chosen anew at a fixed interval of steps, for `fit`
* `select_by_loss`: records drawn by their losses
* `doremi_weights`, `odm_weights`: the next proportions of sources
* `reweighted_loss`, `loss_weights`: rows of a batch weighted, by their losses or by any rule

Optimiser
* `Recipe`: optimiser, schedule, clipping, decay, averaging, accumulation: the options of training
* `prepare`: the state and the train step of a recipe, for `fit`
* `OPTIMIZERS`: the optimisers by name; a row is an `OptimizerKind`
* `adamw`: clipping, AdamW, no decay on vectors; schedules are optax's and those of `toolkit.lr`
* `with_average`: an optimiser that keeps a moving average of the weights
* `evaluation_params`: the weights to evaluate and keep: the average, if there is one

Steps
* `TrainState`: step, parameters, optimiser state
* `make_train_step`: many updates in one compiled program; returns a `TrainStep`
* `make_evaluation`: mean loss over fixed batches

The learning rate
* `search_rate`: training that searches its learning rate; returns a `RateSearch`

The loop
* `ProgramForm`: a program with parameters in a form of its own, for `fit`
* `fit`: train, log, evaluate, checkpoint, stop, resume; takes `FitOptions`, returns a `FitResult`
* `DivergedError`: the loss or the gradient is not finite
* `MetricsLog`, `read_metrics`: JSON lines that agree with the checkpoint
* `Checkpoints`: the newest few, written in the background, restored onto any sharding
* `CheckpointError`, `CheckpointWarning`: a checkpoint was refused
"""

from toolkit.parallel.updates import TrainState
from toolkit.training.averages import evaluation_params, with_average
from toolkit.training.checkpoints.checkpoint import CheckpointError, Checkpoints, CheckpointWarning
from toolkit.training.data.adaptive import (
    AdaptiveBatches,
    doremi_weights,
    loss_weights,
    odm_weights,
    reweighted_loss,
    select_by_loss,
)
from toolkit.training.data.corpora import (
    BYTE_VOCABULARY,
    Corpus,
    CorpusFile,
    evaluation_batches,
    load_corpus,
    load_tokens,
    sample_batch,
)
from toolkit.training.data.host_batches import HostBatches, record_batches, token_batches
from toolkit.training.data.mixtures import MixedSources, TokenWindows, mix_sources
from toolkit.training.data.packing import pack_documents
from toolkit.training.data.sources import CorpusError
from toolkit.training.forms import ProgramForm
from toolkit.training.loop import DivergedError, FitOptions, FitResult, fit
from toolkit.training.metrics import MetricsLog, read_metrics
from toolkit.training.optimiser import OPTIMIZERS, OptimizerKind, adamw
from toolkit.training.rate_search import RateSearch, search_rate
from toolkit.training.recipe import Recipe, prepare
from toolkit.training.step import TrainStep, make_evaluation, make_train_step

__all__ = [
    "BYTE_VOCABULARY", "OPTIMIZERS", "AdaptiveBatches", "CheckpointError", "CheckpointWarning",
    "Checkpoints", "Corpus", "CorpusError", "CorpusFile", "DivergedError", "FitOptions",
    "FitResult", "HostBatches", "MetricsLog", "MixedSources", "OptimizerKind", "ProgramForm",
    "RateSearch", "Recipe", "TokenWindows", "TrainState", "TrainStep", "adamw", "doremi_weights",
    "evaluation_batches", "evaluation_params", "fit", "load_corpus", "load_tokens", "loss_weights",
    "make_evaluation", "make_train_step", "mix_sources", "odm_weights", "pack_documents", "prepare",
    "read_metrics", "record_batches", "reweighted_loss", "sample_batch", "search_rate",
    "select_by_loss", "token_batches", "with_average",
]  # fmt: skip
