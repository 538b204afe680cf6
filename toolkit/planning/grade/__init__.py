"""How good the predictions are: the step itself (`program.py`), a compiler, measurements."""
