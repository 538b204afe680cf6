"""One module per lesson: questions with answers, exercises with judges."""
