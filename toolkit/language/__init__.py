"""Language models on text: training, loading, export, generation.

TrainingRun             the settings that determine a run
train_language_model    train the run in a folder, or resume it
TrainedModel            its result
next_byte_loss          the training loss
pipeline_language_model a looped model cut into the stages of a pipeline
LanguagePipeline        its result
pipeline_batch          a batch in microbatches, for such a pipeline
load_language_model     the model of a run's folder, of a file, or of a published checkpoint
find_tokenizer          the tokenizer stored with a run or an exported model
find_special_tokens     the tokens that start and end a text, from a checkpoint's files
SpecialTokens           its result
load_tokenizer          a checkpoint's tokenizer.json (extra `data`)
write_tokens            text as an array of tokens on disk
read_documents          the documents of such an array, for `pack_documents`
stream_text             continue a prompt, yielding pieces of text
export_language_model   write a run's model to one file, with the record of its training
"""

from toolkit.language.documents import read_documents, write_tokens
from toolkit.language.export import export_language_model
from toolkit.language.load import load_language_model
from toolkit.language.losses import next_byte_loss
from toolkit.language.pipelines import LanguagePipeline, pipeline_batch, pipeline_language_model
from toolkit.language.run import TrainedModel, TrainingRun
from toolkit.language.tokens import (
    SpecialTokens,
    find_special_tokens,
    find_tokenizer,
    load_tokenizer,
)
from toolkit.language.train import train_language_model
from toolkit.language.write import stream_text

__all__ = [
    "LanguagePipeline", "SpecialTokens", "TrainedModel", "TrainingRun", "export_language_model",
    "find_special_tokens", "find_tokenizer", "load_language_model", "load_tokenizer",
    "next_byte_loss", "pipeline_batch", "pipeline_language_model", "read_documents", "stream_text",
    "train_language_model", "write_tokens",
]  # fmt: skip
