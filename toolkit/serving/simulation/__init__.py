"""Serving without a model: iterations as events, their costs, and what policies make of them."""
