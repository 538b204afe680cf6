"""The search for a strategy: for a model (`plan.py`), or per layer (`layers.py`)."""
