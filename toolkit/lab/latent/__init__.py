"""Latent attention on several chips: shards and time of a decode step."""
