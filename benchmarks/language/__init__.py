"""A small language model of characters, for whole optimizers and for normalisers."""
