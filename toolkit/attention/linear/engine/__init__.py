"""What the linear-time mixers share: rules, chunks, decays, the token-by-token recurrence."""
