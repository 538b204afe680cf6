"""NVIDIA Hopper: Mosaic GPU, and Triton where single tokens are fetched."""
