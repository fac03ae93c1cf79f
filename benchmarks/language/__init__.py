"""A small language model of characters: what a run is, the optimizers, the training."""
