"""Linear-time mixers whose state corrects what it holds under a key: the delta rule and its kin."""
