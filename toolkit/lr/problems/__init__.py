"""Problems whose best schedules are known, and what theory says of a schedule."""
