"""Sparse attention on a long text: tokens read, tokens missed, and the cost."""
