"""Layers that read a part of their keys and values."""
