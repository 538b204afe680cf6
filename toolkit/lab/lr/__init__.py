"""A search of the learning rate, round by round, and a race of schedules."""
