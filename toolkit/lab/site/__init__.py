"""Panels that move without a kernel: recorded over a grid of settings, replayed in a browser."""
