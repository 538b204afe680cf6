"""How trees are packed: flows, switches split away, Edmonds' trees, translated trees."""
