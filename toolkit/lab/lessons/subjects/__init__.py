"""The lessons themselves, one module each: questions with answers, exercises with judges."""
