"""What runs reached, of which several lists of claims speak."""

from functools import partial

from ..core.claims import image
from ..methods import having
from . import judges as by

#: Table 1 after a fifth of its epochs.
SHORT = "table1-reduced"
PAPERS_OWN = having("papers")
swept, cnn, pool = (partial(image, name) for name in ("uc-sweep", "cnn", "cnn-pool"))
tanh, leaky = (partial(by.row, activation=name) for name in ("tanh", "leaky-relu"))
short, short_leaky = partial(tanh, file=SHORT), partial(leaky, file=SHORT)
#: Test losses after 400 steps, at the better of the embeddings that were run.
embedded = partial(by.at_best_embeddings, "norm-free")
