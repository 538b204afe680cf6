"""What several lessons use: half-lessons, simulated devices, a worker, a trained layer."""
