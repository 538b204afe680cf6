"""`toolkit tour`: train, compare and shard models on this machine, as one page."""
