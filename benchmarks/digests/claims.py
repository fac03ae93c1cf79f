"""Every claim of the papers and of this library: `claims.csv` names the runs that judge it, and the judge."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from . import judges, special
from .comparisons import beside, settings, table
from .judges import Finding
from .reached import Settings, Stores, runs, trials

LIBRARY = "This library"
#: Name → judge, a function of (stores, file, settings of runs, of each of the others, words behind the name).
JUDGES: Mapping[str, Callable[..., Finding]] = {
    judge.__name__: judge
    for judge in (
        judges.ahead, judges.no_worse, judges.slope, special.along, special.overtakes, special.drop,
        special.flat_rates, special.shrinks, special.own_gain, special.needs_no_jacobians, special.thesis,
        special.same_path, special.loses_less, special.gap, special.bounded, special.never_lowered, special.faster,
        special.same_at_widths,
    )
}  # fmt: skip


class Claim(NamedTuple):
    """One claim, as its row has it."""

    source: str
    text: str
    against: str  # what pages call the others
    file: str  # of results
    runs: str  # it is claimed of every combination
    others: str  # the judge knows what to do with several
    judge: str  # its name, and what more it is told
    epochs: str  # that runs have to be long; empty if any length is

    @property
    def parts(self) -> list[tuple[Settings, list[Settings]]]:
        """The settings of runs that are judged together, and those of the others; all parts have to hold."""
        return [(each, beside(each, self.others)) for each in settings(self.runs)]

    def finding(self, stores: Stores) -> Finding:
        """The verdict; undecided where results are missing, or runs too short."""
        name, *words = self.judge.split()
        judge = JUDGES[name]
        with suppress(LookupError):
            finding = all_of([judge(stores, self.file, ours, others, *words) for ours, others in self.parts])
            longest = max(r["settings"]["epochs"] for r in runs(stores, self.file)) if self.epochs else 0
            if longest < int(self.epochs or 0):
                return finding._replace(holds=None, word=f"{longest} of {self.epochs} epochs")
            return finding
        return Finding(None)

    def trials(self, stores: Stores) -> str:
        """How many settings were tried for its runs, and for those of one other; nothing where none were."""
        if self.file not in stores:
            return ""
        pairs = [(ours, *others) for ours, others in self.parts if len(others) == 1]
        counts = [[trials(stores, self.file, each) for each in pair] for pair in pairs]
        return "; ".join(dict.fromkeys(", ".join(map(str, pair)) for pair in counts if any(pair)))


def all_of(findings: Sequence[Finding]) -> Finding:
    """All of several findings hold; one that does not is enough against it."""
    verdicts = [finding.holds for finding in findings]
    holds = False if False in verdicts else None if None in verdicts else True
    joined = (
        "; ".join(dict.fromkeys(filter(None, texts)))
        for texts in zip(*((each.figure, each.n, each.difference) for each in findings), strict=True)
    )
    figure, n, difference = joined
    return Finding(holds, figure, n, [p for finding in findings for p in finding.p], difference)


CLAIMS = [Claim(**row) for row in table("claims")]
