"""Every claim of the papers and of this library, in a line each, judged by the committed results."""

from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from ..catalogue import RECIPES
from ..core.study import Digest
from ..core.tables import SIGNIFICANT, Cell, Row, Section, Table, exact, grouped, holm, markdown
from .claims import CLAIMS, LIBRARY, Claim
from .judges import Finding
from .reached import Stores

_SHOWN = ["claim", "against", "n", "trials", "difference (95 %)", "p", "Holm's p"]
_HEADER = ["of", *_SHOWN, "verdict", "figure", "results", "what would decide it"]
#: Verdict → what a table is headed by, and the name of its file.
_TABLES = {True: ("Holds", "hold"), False: ("Does not hold", "refuted"), None: ("Undecided", "undecided")}


def decide(claim: Claim) -> str:
    """The command that would decide a claim; empty where none would."""
    study, recipe = RECIPES[claim.file]
    if recipe.decides is None:
        return ""
    command = f"{recipe.commands(study)[0]} {recipe.decides}" if recipe.decides else f"reproduce {claim.file}"
    return f"python -m benchmarks {command}"


def whole_p(finding: Finding) -> float | None:
    """The p of a claim: the greatest of the differences that it needs, the least where one of them refutes it."""
    return (min if finding.holds is False else max)(finding.p, default=None)


class Verdict(NamedTuple):
    """A claim, what results say of it, Holm's p over all claims that have one, and the trials of both sides."""

    claim: Claim
    finding: Finding
    corrected: float | None
    trials: str = ""

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
            finding.figure, claim.file, decide(claim) if self.holds is None else "",
        ]  # fmt: skip


def verdicts(stores: Stores) -> list[Verdict]:
    """The verdicts on all claims."""
    findings = [claim.finding(stores) for claim in CLAIMS]
    values = [whole_p(finding) for finding in findings]
    corrected = iter(holm([p for p in values if p is not None]))
    return [
        Verdict(claim, finding, None if p is None else next(corrected), claim.trials(stores))
        for claim, finding, p in zip(CLAIMS, findings, values, strict=True)
    ]


def on_page(rows: Iterable[Row], without: str = "") -> str:
    """A table with a row for all rivals that a claim has, and without a column."""
    places = [place for place, name in enumerate(_HEADER) if name in _SHOWN and name != without]
    header = [_HEADER[place] for place in places]
    shown = [[cell.text if isinstance(cell, Cell) else cell for cell in map(row.__getitem__, places)] for row in rows]
    columns = [list(zip(*same, strict=True)) for same in grouped(shown, itemgetter(0)).values()]
    joined = [
        ["; ".join(c) if len(set(c)) > 1 or name.endswith("p") else c[0] for name, c in zip(header, each, strict=True)]
        for each in columns
    ]  # every p, though two differences have one
    return markdown(header, joined)


def _section(stores: Stores, name: str, folder: Path) -> Section:
    """How many claims of every source hold, what tests decide, and a file for each verdict with all its claims."""
    judged = grouped(verdicts(stores), lambda verdict: verdict.holds)
    by_verdict = {holds: judged.get(holds, []) for holds in _TABLES}
    counts: list[Row] = [
        [source, *(exact(sum(v.claim.source == source for v in each)) for each in by_verdict.values())]
        for source in dict.fromkeys(claim.source for claim in CLAIMS)
    ]
    decided = {holds: [v.row for v in by_verdict[holds] if v.corrected is not None] for holds in (True, False)}
    pages = [f"**{_TABLES[holds][0]}**\n\n{on_page(rows, 'p' if holds else '')}" for holds, rows in decided.items()]
    files = [Table(_HEADER, [v.row for v in by_verdict[holds]], [], file) for holds, (_, file) in _TABLES.items()]
    return Section([*pages, Table(["source", "hold", "do not", "undecided"], counts, [], "counts"), *files])


#: Without these there is little to judge: one's own runs want no verdicts.
DIGESTS = {"verdicts": Digest(("cifar10", "char-lm"), _section, ("docs/verdicts.md",))}
