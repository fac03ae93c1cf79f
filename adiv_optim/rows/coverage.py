"""The parameters that a correction or a change of coordinates reaches, and why it does not reach the rest."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .models import NAMED

#: Why a parameter is plain whose layer would be treated, had it run.
UNCALLED = "it has a gradient, but its layer was never called: another module uses its weight"


@dataclass(frozen=True, repr=False)
class Coverage:
    """Which trainable parameters are treated, and how; printed, the share and a line for each parameter.

    Before any layer has run, none is treated: the printed share is then of those that wait for a step.

    Args:
        treated: path of the parameter → how its gradient or its step is treated.
        skipped: path → why the parameter keeps the plain gradient and step.
        never_seen: path → why it waits: it would be treated, but its layer has not run.
        elements: path → how many numbers the parameter has, for every path above.
    """

    treated: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    never_seen: Mapping[str, str] = field(default_factory=dict)
    elements: Mapping[str, int] = field(default_factory=dict)

    @property
    def parameter_share(self) -> float:
        """The share of parameters that are treated, in [0, 1]; 0 of a model without any."""
        return len(self.treated) / max(1, self._count)

    @property
    def _count(self) -> int:
        return len(self.treated) + len(self.skipped) + len(self.never_seen)

    @property
    def element_share(self) -> float:
        """The share of elements that are in treated parameters, in [0, 1]."""
        return self._element_share(self.treated)

    def _element_share(self, paths: Iterable[str]) -> float:
        return sum(self.elements[path] for path in paths) / max(1, sum(self.elements.values()))

    def reasons(self, most: int = 4) -> str:
        """Return why parameters are skipped, and the share of all elements that each reason accounts for."""
        sizes: Counter[str] = Counter()
        for path, why in self.skipped.items():
            sizes[why] += self.elements[path]
        total = max(1, sum(self.elements.values()))
        return "; ".join(f"{why} ({size / total:.1%} of the elements)" for why, size in sizes.most_common(most))

    def without_frozen_or_skipped(self) -> "Coverage":
        """Leave out parameters that are frozen or named in skip; those that wait count as treated."""
        elements = {n: size for n, size in self.elements.items() if self.skipped.get(n) not in ("frozen", NAMED)}
        skipped = {name: reason for name, reason in self.skipped.items() if name in elements}
        return Coverage({**self.treated, **self.never_seen}, skipped, elements=elements)

    def __str__(self) -> str:
        """Return the share, then one line per parameter."""
        state, counted = ("are treated", self.treated)
        if self.never_seen and not self.treated:
            state, counted = ("will be treated after a step that runs their layers", self.never_seen)
        lines = [
            f"{len(counted)} of {self._count} parameters {state}, "
            f"{self._element_share(counted):.1%} of {sum(self.elements.values()):,} elements"
        ]
        lines += [f"{path}: {how}" for path, how in self.treated.items()]
        lines += [f"{path}: skipped ({why})" for path, why in self.skipped.items()]
        lines += [f"{path}: never seen ({why})" for path, why in self.never_seen.items()]
        return "\n".join(lines)

    __repr__ = __str__  # for notebooks


def uncalled_words(paths: Sequence[str], most: int = 4) -> str:
    """Return a warning's words for parameters that are plain because of `UNCALLED`."""
    more = f" and {len(paths) - most} more" if len(paths) > most else ""
    return (
        f"{', '.join(paths[:most])}{more}: these have gradients, but their layers were never called. Another module "
        "uses their weights; name the layers in skip."
    )
