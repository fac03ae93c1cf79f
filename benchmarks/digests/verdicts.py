"""Every claim of the papers and of this library, in a line each: `claims.csv` names the runs that judge it, and how."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from ..core.study import Digest
from ..core.tables import SIGNIFICANT, Cell, Row, Section, Table, exact, grouped, holm, markdown
from . import judges
from .judges import Finding
from .reached import Settings, Stores, beside, settings, table, trials

LIBRARY = "This library"
_SHOWN = ["claim", "against", "n", "trials", "difference (95 %)", "p", "Holm's p"]
_HEADER = ["of", *_SHOWN, "verdict", "figure", "results"]
#: Verdict → what a table is headed by, and the name of its file.
_TABLES = {True: ("Holds", "hold"), False: ("Does not hold", "refuted"), None: ("Undecided", "undecided")}


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
        judge: Callable[..., Finding] = getattr(judges, name)
        with suppress(LookupError):
            finding = all_of([judge(stores, self.file, ours, others, *words) for ours, others in self.parts])
            longest = max(r["settings"].get("epochs", 0) for r in stores[self.file].read())
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
        return "; ".join(dict.fromkeys("/".join(map(str, pair)) for pair in counts if any(pair)))


CLAIMS = [Claim(**row) for row in table("claims")]


def all_of(findings: Sequence[Finding]) -> Finding:
    """All of several findings hold; one that does not is enough against it."""
    verdicts = [finding.holds for finding in findings]
    holds = False if False in verdicts else None if None in verdicts else True
    texts = zip(*((each.figure, each.n, each.difference) for each in findings), strict=True)
    figure, n, difference = ("; ".join(dict.fromkeys(filter(None, each))) for each in texts)
    return Finding(holds, figure, n, [p for finding in findings for p in finding.p], difference)


class Verdict(NamedTuple):
    """A claim, what results say of it, Holm's p over all claims that have one, and the trials of both sides."""

    claim: Claim
    finding: Finding
    corrected: float | None
    trials: str

    @property
    def holds(self) -> bool | None:
        """Whether it holds, by Holm's p if there is one; a loss of this library counts by its own p."""
        is_loss = self.claim.source == LIBRARY and self.finding.holds is False
        return self.finding.holds if is_loss or self.corrected is None or self.corrected < SIGNIFICANT else None

    @property
    def row(self) -> Row:
        """Its line; see `_HEADER`."""
        claim, finding = self.claim, self.finding
        is_uncorrected = finding.holds is not None and self.holds is None
        by_itself = f"by its own p it {'holds' if finding.holds else 'does not'}" if is_uncorrected else ""
        return [
            claim.source, claim.text if claim.source == LIBRARY else f"{claim.source}: {claim.text}", claim.against,
            finding.n, self.trials, finding.difference, "; ".join(f"{p:.2g}" for p in finding.p),
            exact(self.corrected, ".3g" if (self.corrected or 0) > 0.01 else ".2g"),
            ", ".join(filter(None, [_TABLES[self.holds][0], finding.word, by_itself])),
            finding.figure, claim.file,
        ]  # fmt: skip


def verdicts(stores: Stores) -> list[Verdict]:
    """The verdicts on all claims; one that needs several differences has the greatest p of them.

    It has the least where one of them refutes it.
    """
    findings = [claim.finding(stores) for claim in CLAIMS]
    values = [(min if finding.holds is False else max)(finding.p, default=None) for finding in findings]
    corrected = iter(holm([p for p in values if p is not None]))
    return [
        Verdict(claim, finding, None if p is None else next(corrected), claim.trials(stores))
        for claim, finding, p in zip(CLAIMS, findings, values, strict=True)
    ]


def _on_page(rows: Sequence[Row], holds: bool) -> str:
    """A table with a row for all rivals that a claim has; what does not hold has p by itself, which counts there."""
    cells = [[cell.text if isinstance(cell, Cell) else cell for cell in row] for row in rows]
    shown = pd.DataFrame(cells, columns=_HEADER)[[name for name in _SHOWN if name != ("p" if holds else "Holm's p")]]
    joined = shown.groupby("claim", sort=False, as_index=False).agg(
        # Every p, though two differences have one.
        lambda each: (
            "; ".join(n or "–" for n in each) if each.nunique() > 1 or each.name.endswith("p") else each.iloc[0]
        )
    )
    return f"**{_TABLES[holds][0]}**\n\n{markdown([*joined], joined.to_numpy())}"


def _section(stores: Stores, name: str, folder: Path) -> Section:
    """How many claims of every source hold, what tests decide, and a file for each verdict with all its claims."""
    judged = grouped(verdicts(stores), lambda verdict: verdict.holds)
    by_verdict = {holds: judged.get(holds, []) for holds in _TABLES}
    counts: list[Row] = [
        [source, *(exact(sum(v.claim.source == source for v in each)) for each in by_verdict.values())]
        for source in dict.fromkeys(claim.source for claim in CLAIMS)
    ]
    pages = [_on_page([v.row for v in by_verdict[each] if v.corrected is not None], each) for each in (True, False)]
    files = [Table(_HEADER, [v.row for v in by_verdict[holds]], [], file) for holds, (_, file) in _TABLES.items()]
    return Section([*pages, Table(["source", "hold", "do not", "undecided"], counts, [], "counts"), *files])


#: Without these there is little to judge: one's own runs want no verdicts.
DIGESTS = {"verdicts": Digest(("cifar10", "char-lm"), _section, "docs/verdicts.md")}
