"""Softmax attention: the bare equation, over blocks of keys, into a cache."""
