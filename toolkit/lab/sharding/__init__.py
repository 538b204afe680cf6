"""One train step on eight devices: its shards and its compiled communication."""
