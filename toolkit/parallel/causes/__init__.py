"""Reading a compiled program back: what it communicates, for whom, by which line."""
