"""Types of arguments that these programs check before they train; argparse adds the name of the argument."""

import argparse
import os
from pathlib import Path

from matplotlib.figure import Figure


def positive(text: str) -> int:
    """A number of the command line that counts from 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def picture_file(text: str) -> Path:
    """A file of the command line to which matplotlib can write a picture; its folder is made."""
    path = Path(text)
    known = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        raise argparse.ArgumentTypeError(f"{text} is no picture by its name; end it in one of .{', .'.join(known)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: its folder cannot be made ({error}); take another") from error
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written; take another file")
    return path
