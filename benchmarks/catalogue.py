"""All studies, and how each makes its files of results."""

from collections.abc import Iterable
from importlib import import_module

from .core.study import Recipe, Study

_FILES = (
    "bench", "comparison", "table1", "papers", "tuned", "language", "norm_free", "coordinates", "equations",
    "benchmarks.problems.regression", "benchmarks.problems.friedman", "benchmarks.problems.surrogates", "streams",
    "mechanism", "isometry_depth", "isometry_training", "benchmarks.speed.suites", "benchmarks.speed.gauss_newton",
)  # fmt: skip


def collect(names: Iterable[str]) -> dict[str, Study]:
    """Command, which is the name of the file of results → study, of some modules of `studies`, or of whole names."""
    modules = [import_module(name if "." in name else f"benchmarks.studies.{name}") for name in names]
    return {name: study for module in modules for name, study in module.STUDIES.items()}


STUDIES = collect(_FILES)


def recipes(studies: dict[str, Study]) -> dict[str, tuple[str, Recipe]]:
    """Name of a file of results → the study that makes it, and how."""
    return {recipe.name or name: (name, recipe) for name, study in studies.items() for recipe in study.makes}


#: Those of all studies.
RECIPES = recipes(STUDIES)
