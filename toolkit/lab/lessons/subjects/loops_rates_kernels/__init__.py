"""Lesson 12, three half-lessons to choose from: loops, learning rates, or a kernel of your own."""

from toolkit.lab.lessons.outline import Outline
from toolkit.lab.lessons.subjects.loops_rates_kernels import (
    causality_trap,
    known_rates,
    own_kernel,
)

_HALVES = (causality_trap, known_rates, own_kernel)
OUTLINE = Outline(
    "Loops, learning rates, or a kernel of your own",
    questions=tuple(question for half in _HALVES for question in half.QUESTIONS),
    exercises=tuple(exercise for half in _HALVES for exercise in half.EXERCISES),
)
