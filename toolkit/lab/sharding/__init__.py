"""One train step on eight devices: who holds what, and what the compiler made of it."""
