"""Layouts propagated through a traced program, with the communication that they cause."""
