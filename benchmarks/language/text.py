"""Text as characters, split into parts to train on, to choose settings by and to report."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

#: The --data argument of the text that ships with Python.
DEFAULT = "python-reference"


class Text(NamedTuple):
    """A text, as the numbers of its characters.

    Args:
        train: the first eight tenths, int64.
        validation: the next tenth.
        test: the last tenth.
        vocabulary: all characters of the text; a character's number is its place here.
    """

    train: Tensor
    validation: Tensor
    test: Tensor
    vocabulary: str

    def to(self, device: str) -> "Text":
        """Return the text on `device`."""
        return Text(self.train.to(device), self.validation.to(device), self.test.to(device), self.vocabulary)


def python_reference() -> str:
    """The Python language reference as `pydoc` ships it, every paragraph once: 0.37 million characters.

    It is the same wherever the Python version is. Topics quote each other at length, so that without removing the
    copies much of the last tenth would stand in the first eight.
    """
    from pydoc_data.topics import topics

    paragraphs = [paragraph.strip("\n") for name in sorted(topics) for paragraph in topics[name].split("\n\n")]
    return "\n\n".join(dict.fromkeys(paragraphs))


def load(data: str) -> Text:
    """Load a text by its --data argument: `DEFAULT`, or the path of a UTF-8 file.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if data == DEFAULT:
        return split(python_reference())
    path = Path(data)
    if not path.is_file():
        raise FileNotFoundError(f"--data {data}: there is no such file; it must be a text, or {DEFAULT!r}.")
    return split(path.read_text(encoding="utf-8"))


def split(characters: str) -> Text:
    """Number the characters of a text and cut it, in its own order, into eight tenths, one and one."""
    vocabulary = "".join(sorted(set(characters)))
    places = {character: place for place, character in enumerate(vocabulary)}
    numbers = torch.tensor([places[character] for character in characters])
    tenth = len(numbers) // 10
    train, validation, test = numbers.split([len(numbers) - 2 * tenth, tenth, tenth])
    return Text(train, validation, test, vocabulary)
