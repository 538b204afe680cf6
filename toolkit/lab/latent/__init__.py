"""Latent attention on several chips: what each holds of a decode step, and what it takes."""
