"""Softmax attention whose positions the data choose: tokens that fade, tokens that reflect."""
