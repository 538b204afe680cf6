"""Reading and writing text with a model: caches, steps, sampling, drafts."""
