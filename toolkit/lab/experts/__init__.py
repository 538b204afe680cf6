"""Instruments of experts: where tokens go, what balances them, and what it costs to send them."""
