"""What every figure of results is made of."""

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


@contextmanager
def panels(names: Sequence[str], title: str, path: Path, width: float = 5.4) -> Iterator[Sequence[Any]]:
    """Yield one axis per name, side by side with one legend on the right, and write the figure to `path`."""
    size = (width * len(names) + 2.2, 4.6 if width > 4 else width + 0.9)
    fig, axes = plt.subplots(1, len(names), figsize=size, sharey=True, squeeze=False, layout="constrained")
    with saved(fig, path):
        yield axes[0]
        for axis, name in zip(axes[0], names, strict=True):
            axis.set_title(name)
            axis.grid(alpha=0.3)
        # A method may be in some of the panels only.
        handles = {
            label: handle for axis in axes[0] for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        fig.legend(handles.values(), handles.keys(), loc="outside right center", frameon=False)
        # At this size about twelve characters are an inch.
        fig.suptitle(textwrap.fill(title, int(12 * size[0])), fontsize=10)


@contextmanager
def saved(fig: Any, path: Path) -> Iterator[None]:
    """Write a figure to `path` once it is drawn, and forget it."""
    try:
        yield
        path.parent.mkdir(parents=True, exist_ok=True)
        fig.savefig(path, dpi=130)
    finally:
        plt.close(fig)
