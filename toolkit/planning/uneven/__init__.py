"""Unequal links between nodes (`placement.py`) and unequal sequences (`sequences.py`)."""
