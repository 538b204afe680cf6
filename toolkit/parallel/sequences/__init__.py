"""Sequences of unequal or great length: classes with little padding, groups of devices, pieces."""
