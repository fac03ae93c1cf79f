"""Every claim of the papers and of this library, in a line each, judged by the committed results."""

from collections.abc import Mapping
from pathlib import Path

from ..core.claims import HEADER, Claim, line
from ..core.store import Store
from ..core.study import Digest
from ..core.table import Row, Section, Table, exact
from ..studies import RECIPES
from .ours import FIELDS, OURS
from .papers import BIRD, JOUDAKI, SU, UHLMANN

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
    if claim.command:
        return f"python -m benchmarks {claim.command}"
    file = claim.files.split(", ")[0]
    study, recipe = RECIPES[file]
    if recipe.decides is None:
        return ""
    command = f"{recipe.commands(study)[0]} {recipe.decides}" if recipe.decides else f"reproduce {file}"
    return f"python -m benchmarks {command}"


def _verdicts(stores: Mapping[str, Store], name: str, folder: Path) -> Section:
    """How many claims of every source hold, and a line for each of them."""
    counts, rows = list[Row](), list[Row]()
    for source, claims in CLAIMS.items():
        found = [claim.found(stores) for claim in claims]
        verdicts = [one.holds for one in found]
        counts.append([source, *(exact(verdicts.count(each)) for each in (True, False, None))])
        for claim, one in zip(claims, found, strict=True):
            rows.append([source, *line(claim, one, decide(claim) if one.holds is None else "")])
    first = Table(["source", "hold", "do not", "undecided"], counts, name="counts")
    return Section([first, Table(["source", *HEADER], rows)])


#: Without these there is little to judge: one's own runs want no verdicts.
DIGESTS = {"verdicts": Digest(("cifar10", "char-lm"), _verdicts, ("docs/verdicts.md",))}
