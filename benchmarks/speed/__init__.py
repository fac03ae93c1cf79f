"""Time and memory, always as a ratio to plain torch within one interleaved run."""
