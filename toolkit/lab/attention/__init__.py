"""The cost of a longer context, and one sentence read by softmax and by the delta rule."""
