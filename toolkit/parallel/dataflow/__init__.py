"""Layouts followed through a traced program: what a cut of its inputs would communicate."""
