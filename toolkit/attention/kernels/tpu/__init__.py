"""TPU: Mosaic TPU."""
