"""Networks that a normaliser has no place in: coordinate networks, physics-informed networks, conditioned features."""
