"""A train step planned before anything is compiled: what a chip holds, what fits, which is best."""
