"""Isometry of random and of trained networks: the experiments of Joudaki et al. 2023."""
