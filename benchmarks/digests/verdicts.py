"""Every claim of the papers and of this library, in a line each, judged by the committed results."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..catalogue import RECIPES
from ..core.store import Store
from ..core.study import Digest
from ..core.tables import SIGNIFICANT, Cell, Row, Section, Table, exact
from .claims_of_ours import FIELDS, OURS
from .claims_of_papers import BIRD, JOUDAKI, SU, UHLMANN
from .judges import HEADER, Claim, Finding, line

#: Source → its claims.
CLAIMS = {
    "Bird 2025": BIRD,
    "Uhlmann": UHLMANN,
    "Joudaki et al. 2023": JOUDAKI,
    "Su 2025": SU,
    "This library": OURS,
    "This library, pictures, equations and regression": FIELDS,
}


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
    found, least = [0.0] * len(values), 0.0
    for smaller, place in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        least = max(least, min(1.0, (len(values) - smaller) * values[place]))
        found[place] = least
    return found


def whole_p(finding: Finding) -> float | None:
    """The p of a claim: the greatest of the differences that it needs, the least where one of them refutes it."""
    each = [float(p) for p in finding.p.split("; ") if p]
    return (min if finding.holds is False else max)(each, default=None)


def judged(stores: Mapping[str, Store]) -> list[tuple[str, Claim, Finding, float | None]]:
    """Source, claim, what results say of it, and Holm's p over all claims that have one."""
    every = [(source, claim, claim.found(stores)) for source, claims in CLAIMS.items() for claim in claims]
    values = [whole_p(found) for *_, found in every]
    corrected = iter(holm([p for p in values if p is not None]))
    return [(*one, None if p is None else next(corrected)) for one, p in zip(every, values, strict=True)]


#: A difference with its sign, at the end of what a finding compares, and its interval if it has one.
_DIFFERENCE = re.compile(r"(?:^|, |; )([+-]\d[\d.]*)(?:, 95 % from (\S+) to ([^\s;]+))?(?=$|;)")


def _short(figure: str) -> Cell:
    """The differences of some figures with their intervals, for a page; the file of the table has all of it."""
    short = [d + (f" [{low}, {high}]" if low else "") for d, low, high in _DIFFERENCE.findall(figure)]
    return Cell("; ".join(short), {"": figure} if figure else {})


def is_shown(source: str, found: Finding, corrected: float | None) -> bool:
    """Whether a page shows a claim: one that Holm's correction leaves decided, or a loss of this library at all."""
    if corrected is None or found.holds is None:
        return False
    return corrected < SIGNIFICANT or (source.startswith("This library") and found.holds is False)


#: Verdict → the heading of its table, and the name of its file.
_TABLES = {True: ("Hold", "hold"), False: ("Do not hold", "refuted"), None: ("", "undecided")}


def _verdicts(stores: Mapping[str, Store], name: str, folder: Path) -> Section:
    """How many claims of every source hold, and for each verdict a line for each of its claims."""
    counts, every = list[Row](), judged(stores)
    rows: dict[bool | None, list[tuple[bool, Row]]] = {holds: [] for holds in _TABLES}
    for source in CLAIMS:
        own = [(claim, found, p) for other, claim, found, p in every if other == source]
        cells = [[p for _, found, p in own if found.holds is verdict] for verdict in (True, False, None)]
        after = sum(p is not None and p < SIGNIFICANT for p in cells[0])
        counts.append([source, *(exact(len(each)) for each in cells), exact(after)])
        for claim, found, p in own:
            text, verdict, figure, n, own_p, *rest = line(claim, found, decide(claim) if found.holds is None else "")
            text = text if source.startswith("This library") else f"{source}: {text}"
            row = [source, text, verdict, _short(str(figure)), n, own_p, exact(p, ".1g"), *rest]
            repeats = claim.in_calls and found.holds
            rows[found.holds].append((is_shown(source, found, p) and not repeats, row))
    first = Table(["source", "hold", "do not", "undecided", "hold after Holm, by a p"], counts, name="counts")
    header = ["of", *HEADER[:2], "difference (95 %)", *HEADER[3:5], "Holm's p", *HEADER[5:]]
    tables = []
    for holds, (heading, file) in _TABLES.items():
        shown = [worth for worth, _ in rows[holds]] if holds is not None else []
        whole = [row for _, row in rows[holds]]
        tables.append(Table(header, whole, shown, file, heading))
    return Section([first, *tables])


#: Without these there is little to judge: one's own runs want no verdicts.
DIGESTS = {"verdicts": Digest(("cifar10", "char-lm"), _verdicts, ("docs/verdicts.md",))}
