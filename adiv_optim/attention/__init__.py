"""Attention logits whose parameter step is ideal: the correction that affine layers have, for query and key."""

from ._logits import logits
from ._module import LogitProjection, SelfAttention
from ._rule import AttentionIdeal
from ._step import Alignment, LogitStep, alignment, effective_logit_update, ideal_logit_step

__all__ = [
    "Alignment",
    "AttentionIdeal",
    "LogitProjection",
    "LogitStep",
    "SelfAttention",
    "alignment",
    "effective_logit_update",
    "ideal_logit_step",
    "logits",
]
