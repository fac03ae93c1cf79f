"""What a correction or a change of coordinates reaches of a model, and why it does not reach the rest."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Coverage:
    """Which trainable parameters are treated, and how; printed, the share and a line for each parameter.

    Args:
        treated: path of the parameter → what is done to its gradient or its step.
        skipped: path → why the parameter keeps the plain gradient and step.
        never_seen: path → what it waits for: it would be treated, but its layer has not run.
        elements: path → how many numbers the parameter has, for every path above.
    """

    treated: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    never_seen: Mapping[str, str] = field(default_factory=dict)
    elements: Mapping[str, int] = field(default_factory=dict)

    @property
    def parameter_share(self) -> float:
        """The share of parameters that are treated, in [0, 1]; 0 of a model without any."""
        every = len(self.treated) + len(self.skipped) + len(self.never_seen)
        return len(self.treated) / max(1, every)

    @property
    def element_share(self) -> float:
        """The share of their elements that are in treated parameters, in [0, 1]."""
        return sum(self.elements[path] for path in self.treated) / max(1, sum(self.elements.values()))

    def __str__(self) -> str:
        """Return the share, then one line per parameter."""
        every = len(self.treated) + len(self.skipped) + len(self.never_seen)
        lines = [
            f"{len(self.treated)} of {every} parameters are treated, "
            f"{self.element_share:.1%} of {sum(self.elements.values()):,} elements"
        ]
        lines += [f"{path}: {how}" for path, how in self.treated.items()]
        lines += [f"{path}: skipped ({why})" for path, why in self.skipped.items()]
        lines += [f"{path}: never seen ({what})" for path, what in self.never_seen.items()]
        return "\n".join(lines)
