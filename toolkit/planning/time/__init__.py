"""How long a step takes: modelled (`step.py`, `pipelines.py`), or as compiled (`timeline.py`)."""
