"""Reading a compiled program: what it communicates, and the lines that cause it."""
