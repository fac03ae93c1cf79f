"""Scales: of one matrix (RZ), and of all channels of a network."""
