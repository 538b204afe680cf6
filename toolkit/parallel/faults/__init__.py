"""Which collectives of a program need not be, and the change of its layout that removes each."""
