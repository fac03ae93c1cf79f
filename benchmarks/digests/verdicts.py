"""Every claim of the papers and of this library, in a line each, judged by the committed results."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..catalogue import RECIPES
from ..core.store import Store
from ..core.study import Digest
from ..core.tables import SIGNIFICANT, Cell, Row, Section, Table, exact
from .claims import CLAIMS
from .judges import Claim, Finding


def decide(claim: Claim) -> str:
    """The command that would decide a claim; empty where none would."""
    file = claim.files.split(", ")[0]
    study, recipe = RECIPES[file]
    if recipe.decides is None:
        return ""
    command = f"{recipe.commands(study)[0]} {recipe.decides}" if recipe.decides else f"reproduce {file}"
    return f"python -m benchmarks {command}"


def holm(values: Sequence[float]) -> list[float]:
    """Holm's p of several tests: each p times how many are not smaller, and no less than those of smaller ones.

    Example:
        >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03, 0.005])]
        [0.03, 0.06, 0.06, 0.02]
    """
    order, corrected = np.argsort(values, kind="stable"), np.empty(len(values))
    corrected[order] = np.maximum.accumulate(np.minimum(1, np.sort(values) * np.arange(len(values), 0, -1)))
    return [float(p) for p in corrected]


def whole_p(finding: Finding) -> float | None:
    """The p of a claim: the greatest of the differences that it needs, the least where one of them refutes it."""
    each = [float(p) for p in finding.p.split("; ") if p]
    return (min if finding.holds is False else max)(each, default=None)


class Verdict(NamedTuple):
    """A claim, what results say of it, and Holm's p over all claims that have one."""

    source: str
    claim: Claim
    finding: Finding
    corrected: float | None

    @property
    def is_ours(self) -> bool:
        """Whether this library makes the claim."""
        return self.source.startswith("This library")

    @property
    def is_shown(self) -> bool:
        """Whether a page shows it: one that Holm's correction leaves decided, or a loss of this library at all."""
        if self.corrected is None or self.finding.holds is None or (self.finding.holds and self.claim.in_calls):
            return False
        return self.corrected < SIGNIFICANT or (self.is_ours and not self.finding.holds)

    @property
    def row(self) -> Row:
        """Its line; see `_HEADER`."""
        claim, finding = self.claim, self.finding
        word = {True: "holds", False: "does not hold", None: "undecided"}[finding.holds]
        difference = Cell(finding.difference, {"": finding.figure} if finding.figure else {})
        command = decide(claim) if finding.holds is None else ""
        return [
            self.source, claim.text if self.is_ours else f"{self.source}: {claim.text}",
            f"**{word}**" + (f", {finding.word}" if finding.word else ""), difference, finding.n, finding.p,
            exact(self.corrected, ".1g"), claim.files, f"`{command}`" if command else "",
        ]  # fmt: skip


_HEADER = ["of", "claim", "verdict", "difference (95 %)", "n", "p", "Holm's p", "results", "what would decide it"]
#: Verdict → the heading of its table, and the name of its file.
_TABLES = {True: ("Hold", "hold"), False: ("Do not hold", "refuted"), None: ("", "undecided")}


def verdicts(stores: Mapping[str, Store]) -> list[Verdict]:
    """The verdicts on all claims."""
    findings = [(source, claim, claim.finding(stores)) for source, claims in CLAIMS.items() for claim in claims]
    values = [whole_p(finding) for *_, finding in findings]
    corrected = iter(holm([p for p in values if p is not None]))
    return [Verdict(*each, None if p is None else next(corrected)) for each, p in zip(findings, values, strict=True)]


def _section(stores: Mapping[str, Store], name: str, folder: Path) -> Section:
    """How many claims of every source hold, and for each verdict a line for each of its claims."""
    every, counts = verdicts(stores), list[Row]()
    for source in CLAIMS:
        by_verdict = [[v for v in every if v.source == source and v.finding.holds is holds] for holds in _TABLES]
        certain = sum(v.corrected is not None and v.corrected < SIGNIFICANT for v in by_verdict[0])
        counts.append([source, *(exact(len(each)) for each in by_verdict), exact(certain)])
    parts = [Table(["source", "hold", "do not", "undecided", "hold after Holm, by a p"], counts, name="counts")]
    for holds, (heading, file) in _TABLES.items():
        rows = [v for v in every if v.finding.holds is holds]
        shown = [v.is_shown for v in rows] if holds is not None else []
        parts.append(Table(_HEADER, [v.row for v in rows], shown, file, heading))
    return Section(parts)


#: Without these there is little to judge: one's own runs want no verdicts.
DIGESTS = {"verdicts": Digest(("cifar10", "char-lm"), _section, ("docs/verdicts.md",))}
