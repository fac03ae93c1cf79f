"""The studies, a file per table: what is compared, how it is trained, what is drawn."""

from ..core.study import Study
from ..speed import suites
from . import (
    attention,
    batch_size,
    char_lm,
    comparison,
    divergence,
    isometry_depth,
    isometry_training,
    plane,
    table1,
    tuned,
    unit_rescaling,
    unit_sweep,
)

_MODULES = (
    comparison, table1, batch_size, tuned, unit_sweep, unit_rescaling, char_lm, divergence, attention, isometry_depth,
    isometry_training, plane, suites,
)  # fmt: skip
#: Command and name of the file of results → study.
STUDIES: dict[str, Study] = {name: study for module in _MODULES for name, study in module.STUDIES.items()}
