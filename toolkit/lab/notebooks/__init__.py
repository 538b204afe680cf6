"""Notebooks run in fresh kernels, and served."""
