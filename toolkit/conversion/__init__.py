"""A trained looped softmax model becomes a hybrid with a few attention layers left.

student.py        the teacher with other mixers, and with some attention restored
alignment.py      stage 1's loss: each new mixer against the attention it replaces
selection.py      which attention layers to restore
distillation.py   stage 2's loss: predictions against the teacher's, after every loop
plan.py           ConversionPlan: steps, rates, lengths
stage.py          each stage as a run of `training.fit`
recipe.py         convert: all of them, in order
"""

from toolkit.conversion.alignment import alignment_losses
from toolkit.conversion.distillation import loop_weights, top_k_divergence
from toolkit.conversion.plan import ConversionPlan
from toolkit.conversion.recipe import Conversion, convert
from toolkit.conversion.selection import restoration_benefits
from toolkit.conversion.student import STARTABLE, student_from

__all__ = [
    "STARTABLE",
    "Conversion",
    "ConversionPlan",
    "alignment_losses",
    "convert",
    "loop_weights",
    "restoration_benefits",
    "student_from",
    "top_k_divergence",
]
