"""Collectives on networks: the cut that limits them, and chunks on their way."""
