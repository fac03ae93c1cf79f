"""Tools of every room: linear algebra that torch lacks, tensors cut among processes, limits of settings."""
