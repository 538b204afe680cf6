"""Conversion of a trained looped softmax model into a hybrid with a few attention layers.

convert                  all stages in order (`recipe.py`)
Conversion               its result: the model, and measurements on the way
ConversionPlan           steps, rates and lengths of the stages (`plan.py`, `stage.py`)
student_from             the teacher with new mixers, initialised from its attention (`student.py`)
STARTABLE                the layers that can be initialised so
upcycled                 a dense model as a mixture of experts (`upcycling.py`)
alignment_losses         stage 1: distance of each new mixer from the attention it replaces
restoration_benefits     the benefit of restoring each attention layer (`selection.py`)
top_k_divergence         stage 2: divergence of the student's predictions from the teacher's
loop_weights             the weight of each loop in it (`distillation.py`)
"""

from toolkit.conversion.alignment import alignment_losses
from toolkit.conversion.distillation import loop_weights, top_k_divergence
from toolkit.conversion.plan import ConversionPlan
from toolkit.conversion.recipe import Conversion, convert
from toolkit.conversion.selection import restoration_benefits
from toolkit.conversion.student import STARTABLE, student_from
from toolkit.conversion.upcycling import upcycled

__all__ = [
    "STARTABLE", "Conversion", "ConversionPlan", "alignment_losses", "convert", "loop_weights",
    "restoration_benefits", "student_from", "top_k_divergence", "upcycled",
]  # fmt: skip
