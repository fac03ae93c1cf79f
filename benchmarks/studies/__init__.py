"""The studies, a file per table: what is compared, how it is trained, what is drawn."""

from importlib import import_module

from ..core.study import Recipe, Study
from . import gpu

_FILES = (
    "comparison", "table1", "departures", "papers", "tuned", "factorial", "units", "char_lm", "norm_free", "divergence",
    "attention", "coordinates", "poisson", "tabular", "mechanism", "isometry_depth", "isometry_training", "plane",
)  # fmt: skip
_MODULES = [import_module(f"{__name__}.{name}") for name in _FILES]
_MODULES += [import_module(f"benchmarks.speed.{name}") for name in ("suites", "devices")]
#: Command and name of the file of results → study.
STUDIES: dict[str, Study] = {name: study for module in _MODULES for name, study in module.STUDIES.items()}
STUDIES["gpu"] = gpu.study(STUDIES)
#: Name of a file of results → the study that makes it, and how.
RECIPES: dict[str, tuple[str, Recipe]] = {
    recipe.name or name: (name, recipe) for name, study in STUDIES.items() for recipe in study.makes
}
