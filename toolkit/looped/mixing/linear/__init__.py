"""Layers whose memory is a state of one size, one file for each paper or family."""
