"""Token mixers linear in time, one file per method, on one engine."""
