"""For each lesson: exercise -> its solution, and wrong answers with what is said of them."""
