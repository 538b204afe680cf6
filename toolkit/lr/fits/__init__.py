"""What is fitted to losses: curves, laws, Gaussian processes, the best peak rate."""
