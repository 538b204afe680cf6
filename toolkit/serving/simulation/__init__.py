"""Serving without a model: iterations as events, their costs, and the effect of policies."""
