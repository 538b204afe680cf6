"""Layers that read only a part of their keys and values."""
