"""A small language model of characters: whole optimizers against each other, with and without normalisers."""
