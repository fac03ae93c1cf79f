"""What runs tell while they train, to those who watch: scalars in the files that TensorBoard reads."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: Called with how far a run is, in epochs or steps, and what was measured there: name → a value for each seed or run.
Note = Callable[[int, Mapping[str, Sequence[float | None]]], None]


def silent(at: int, measured: Mapping[str, Sequence[float | None]]) -> None:
    """Tell nobody."""


def summary_writer() -> Any:
    """The class of torch's own writer; a ValueError without the package whose format it writes."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError(
            "--log tensorboard needs the package tensorboard; pip install tensorboard brings it."
        ) from error
    return SummaryWriter


@contextmanager
def noted(folder: Path | None) -> Iterator[Note]:
    """Yield what writes scalars to a folder, or to nowhere."""
    if folder is None:
        yield silent
        return
    writer = summary_writer()(str(folder))

    def note(at: int, measured: Mapping[str, Sequence[float | None]]) -> None:
        for name, values in measured.items():
            for number, value in enumerate(values):
                if value is not None:
                    writer.add_scalar(f"{name}/{number}" if len(values) > 1 else name, value, at)
        writer.flush()

    try:
        yield note
    finally:
        writer.close()
