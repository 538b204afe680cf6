"""Systems that decode sparsely from the cache of a model trained dense, one file per system."""
