"""Linear algebra that torch has not."""
