"""Workers that agree seldom, by one number, or despite those that are late."""
