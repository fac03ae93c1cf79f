"""What every room stands on: linear algebra that torch has not, tensors cut among processes, limits of settings."""
