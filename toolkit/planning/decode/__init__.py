"""Decoding on several chips (`latent.py`)."""
