"""Which strategy to take: for a model (`plan.py`), or for each layer of it (`layers.py`)."""
