"""What a longer context costs, and what softmax and the delta rule read in one sentence."""
