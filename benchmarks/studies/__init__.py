"""The studies, a file per table: what is compared, how it is trained, what is drawn."""

from ..core.study import Study
from ..speed.suites import SPEED
from .attention import ATTENTION
from .batch_size import BATCH_SIZE
from .char_lm import CHAR_LM, CHAR_LM_2000, CHAR_LM_EQUAL_TIME, CHAR_LM_WRAPPERS
from .comparison import CIFAR10, CNN, CNN_POOL, COMPARE, DIGITS
from .divergence import DIVERGENCE
from .isometry_depth import ISOMETRY_DEPTH
from .isometry_training import ISOMETRY_TRAINING
from .plane import NORMALISERS_PLANE
from .table1 import TABLE1
from .tuned import CIFAR10_LONG, CIFAR10_TRIALS, CIFAR10_TUNED, DIGITS_TUNED
from .unit_rescaling import UC_RESCALED
from .unit_sweep import UC_SWEEP

#: Command and name of the file of results → study.
STUDIES: dict[str, Study] = {
    "digits": DIGITS,
    "cifar10": CIFAR10,
    "table1": TABLE1,
    "batch-size": BATCH_SIZE,
    "compare": COMPARE,
    "cifar10-tuned": CIFAR10_TUNED,
    "cifar10-trials": CIFAR10_TRIALS,
    "cifar10-long": CIFAR10_LONG,
    "digits-tuned": DIGITS_TUNED,
    "cnn-pool": CNN_POOL,
    "cnn": CNN,
    "uc-sweep": UC_SWEEP,
    "uc-rescaled": UC_RESCALED,
    "char-lm": CHAR_LM,
    "char-lm-2000": CHAR_LM_2000,
    "char-lm-equal-time": CHAR_LM_EQUAL_TIME,
    "char-lm-wrappers": CHAR_LM_WRAPPERS,
    "divergence": DIVERGENCE,
    "attention": ATTENTION,
    "isometry-depth": ISOMETRY_DEPTH,
    "isometry-training": ISOMETRY_TRAINING,
    "normalisers-plane": NORMALISERS_PLANE,
    "speed": SPEED,
}
