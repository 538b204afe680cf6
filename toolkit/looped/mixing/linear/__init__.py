"""Layers with a recurrent state of constant size, one file per paper or family."""
