"""What is not alike: links between nodes (`placement.py`), sequences (`sequences.py`)."""
