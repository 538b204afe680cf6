"""Jobs of several processes: starting, watching, synchronising and submitting them."""
