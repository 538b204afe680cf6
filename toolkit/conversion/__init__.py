"""A trained looped softmax model becomes a hybrid with a few attention layers left.

convert                  all stages in order (`recipe.py`)
Conversion               what that left: the model, and what was seen on the way
ConversionPlan           steps, rates and lengths of the stages (`plan.py`, `stage.py`)
student_from             the teacher with other mixers, started from its attention (`student.py`)
STARTABLE                the layers that can be started so
upcycled                 a dense model as a mixture of experts (`upcycling.py`)
alignment_losses         stage 1: how far each new mixer is from the attention it replaces
restoration_benefits     how much restoring each attention layer would help (`selection.py`)
top_k_divergence         stage 2: how far a student's predictions are from the teacher's
loop_weights             how much those after each loop count (`distillation.py`)
"""

from toolkit.conversion.alignment import alignment_losses
from toolkit.conversion.distillation import loop_weights, top_k_divergence
from toolkit.conversion.plan import ConversionPlan
from toolkit.conversion.recipe import Conversion, convert
from toolkit.conversion.selection import restoration_benefits
from toolkit.conversion.student import STARTABLE, student_from
from toolkit.conversion.upcycling import upcycled

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
    "upcycled",
]
