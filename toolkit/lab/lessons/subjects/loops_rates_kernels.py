"""Lesson 12, three half-lessons to choose from: loops, learning rates, or a kernel of your own."""

from toolkit.lab.lessons.outline import Outline
from toolkit.lab.lessons.subjects.parts import causality_trap, known_rates, own_kernel

_HALVES = (causality_trap, known_rates, own_kernel)
OUTLINE = Outline(
    "Loops, learning rates, or a kernel of your own",
    questions=tuple(one for half in _HALVES for one in half.QUESTIONS),
    exercises=tuple(one for half in _HALVES for one in half.EXERCISES),
)
