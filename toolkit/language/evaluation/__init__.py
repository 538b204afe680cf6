"""Evaluation of language models on tasks, without a network.

evaluate          the metrics of a model on rows of a task
Scores            its result
read_task         rows from a JSONL file, with the fields of lm-evaluation-harness
drawn_rows        rows of "needle", "recall" and "associative", drawn here
Choice, Continuation, Document   the kinds of rows
log_likelihoods   of tokens after other tokens
Likelihood        its result
Words             a tokenizer as evaluation asks it
harness_model     a model for lm-evaluation-harness itself
"""

from toolkit.language.evaluation.evaluate import Scores, evaluate
from toolkit.language.evaluation.harness import harness_model
from toolkit.language.evaluation.likelihoods import Likelihood, Words, log_likelihoods
from toolkit.language.evaluation.rows import Choice, Continuation, Document, drawn_rows, read_task

__all__ = [
    "Choice", "Continuation", "Document", "Likelihood", "Scores", "Words", "drawn_rows", "evaluate",
    "harness_model", "log_likelihoods", "read_task",
]  # fmt: skip
