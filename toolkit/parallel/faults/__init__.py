"""Avoidable collectives of a program, and the change of its layout that removes each."""
