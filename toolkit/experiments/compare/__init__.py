"""`toolkit compare`: which of several language models is better on a text, matched and tuned."""
