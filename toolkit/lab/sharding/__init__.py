"""One train step on eight simulated devices, as the compiler made it."""
