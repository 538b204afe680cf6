"""Sparse attention: what each system reads of a long text, what it misses, and what it costs."""
