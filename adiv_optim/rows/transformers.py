"""The linear layer of the package transformers; imported once a model has one, or by a pickle of a model with one."""

from transformers.pytorch_utils import Conv1D

from .layers import CorrectedTransposed, register


class CorrectedTransformersConv1D(CorrectedTransposed, Conv1D):
    """transformers.pytorch_utils.Conv1D through `functional.linear`; made by `attach`, not by hand."""


register(Conv1D, CorrectedTransformersConv1D)
