"""Grading of predictions by a compiler and by measurements; `program.py` builds the step itself."""
