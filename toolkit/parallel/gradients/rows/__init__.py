"""Sparse rows of embeddings: pushed to owners and pulled, and the bytes of other ways."""
