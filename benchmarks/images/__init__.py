"""Networks for images: all seeds of a run train as one program."""
