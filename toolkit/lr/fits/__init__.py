"""Fits to losses: curves, Gaussian processes, the best peak rate."""
