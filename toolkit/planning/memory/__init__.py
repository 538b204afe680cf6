"""Memory of one chip by category (`categories.py`) and by tensor (`sizes.py`)."""
