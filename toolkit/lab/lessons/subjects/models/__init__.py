"""Lessons on models and how they learn."""
