"""Networks: as data, by shape, and of machines."""
