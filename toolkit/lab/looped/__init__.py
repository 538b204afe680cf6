"""Influences, predictions, state and cost of one byte after each loop of a small trained model."""
