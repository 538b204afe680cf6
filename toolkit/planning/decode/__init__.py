"""Decoding on several chips (`latent.py`): which scheme is fastest (`choice.py`)."""
