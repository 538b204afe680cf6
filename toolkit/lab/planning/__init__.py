"""A train step planned before anything is compiled: memory per chip, what fits, the best
strategy."""
