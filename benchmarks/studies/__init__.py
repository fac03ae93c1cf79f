"""The studies, a file per table: what is compared, how it is trained, what is drawn."""

from importlib import import_module

from ..core.study import Digest, Study
from . import defaults, overview, scale, verdicts

_FILES = (
    "comparison", "table1", "departures", "papers", "tuned", "factorial", "units", "char_lm", "norm_free", "divergence",
    "coordinates", "poisson", "tabular", "mechanism", "isometry_depth", "isometry_training", "plane",
    "gpu",
)  # fmt: skip
_MODULES = [import_module(f"{__name__}.{name}") for name in _FILES]
_MODULES += [import_module(f"benchmarks.speed.{name}") for name in ("suites", "devices")]
#: Command and name of the file of results → study.
STUDIES: dict[str, Study] = {name: study for module in _MODULES for name, study in module.STUDIES.items()}
#: Name of a section → how it is made from several files of results.
DIGESTS: dict[str, Digest] = overview.DIGESTS | scale.DIGESTS | verdicts.DIGESTS | defaults.DIGESTS
