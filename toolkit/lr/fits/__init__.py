"""Fits to losses: curves, scaling laws, Gaussian processes, the best peak rate."""
