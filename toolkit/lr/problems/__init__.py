"""Problems with known best schedules, and theoretical bounds on schedules."""
