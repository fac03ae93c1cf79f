"""Every claim of the papers and of this library, in a line each, judged by the committed results."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..core.store import Store
from ..core.study import Digest
from ..core.table import SIGNIFICANT, Cell, Row, Section, Table, exact
from ..studies import RECIPES
from .claims_of_ours import FIELDS, OURS
from .claims_of_papers import BIRD, JOUDAKI, SU, UHLMANN
from .judges import HEADER, Claim, Finding, line

#: Source → its claims.
CLAIMS = {
    "Bird 2025, The Affine Divergence": BIRD,
    "Uhlmann, Unit-Consistent (UC) Adjoint": UHLMANN,
    "Joudaki, Daneshmand and Bach 2023, isometry": JOUDAKI,
    "Su 2025, DyT and DyISRU": SU,
    "This library": OURS,
    "This library, where a normaliser cannot go": FIELDS,
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


#: A difference with its sign, at the end of what a finding compares.
_DIFFERENCE = re.compile(r"(?:^|, )([+-]\d[\d.]*)(?=$|;|, 95 %)")


def _short(figure: str, p: float | None) -> Cell:
    """The differences of some figures alone, and Holm's p, for a page; the file of the whole table has all of it."""
    short = [*_DIFFERENCE.findall(figure), *([] if p is None else [f"({p:.1g})"])]
    return Cell("; ".join(short).replace("; (", " ("), {"": figure} if figure else {})


def _verdicts(stores: Mapping[str, Store], name: str, folder: Path) -> Section:
    """How many claims of every source hold, and for each source a line for each of them."""
    counts, tables, every = list[Row](), list[Table](), judged(stores)
    place = HEADER.index("p")
    for number, source in enumerate(CLAIMS):
        own = [(claim, found, p) for other, claim, found, p in every if other == source]
        cells = [[p for _, found, p in own if found.holds is verdict] for verdict in (True, False, None)]
        after = sum(p is not None and p < SIGNIFICANT for p in cells[0])
        counts.append([source, *(exact(len(each)) for each in cells), exact(after)])
        rows, worth = list[Row](), list[bool]()
        for claim, found, p in own:
            text, verdict, figure, *rest = line(claim, found, decide(claim) if found.holds is None else "")
            alone = found.holds is not None and p is not None and p >= SIGNIFICANT
            shown = [text, f"{verdict}{', alone' * alone}", _short(str(figure), p), *rest[: place - 2]]
            rows.append([*shown, exact(p, ".1g"), *rest[place - 2 :]])
            # A page shows what runs have decided, and of this library what they have not.
            worth.append(found.holds is not None or source.startswith("This library"))
        header = [*HEADER[:2], "difference (p)", *HEADER[3 : place + 1], "Holm's p", *HEADER[place + 1 :]]
        tables.append(Table(header, rows, worth, _FILES[number], source))
    first = Table(["source", "hold", "do not", "undecided", "hold after Holm, by a p"], counts, name="counts")
    return Section([first, *tables])


#: What the tables of the sources are called.
_FILES = "bird", "uhlmann", "joudaki", "su", "library", "fields"
#: Without these there is little to judge: one's own runs want no verdicts.
DIGESTS = {"verdicts": Digest(("cifar10", "char-lm"), _verdicts, ("docs/verdicts.md",))}
