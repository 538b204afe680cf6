"""Lessons on programs: kernels, traces, formats of numbers."""
