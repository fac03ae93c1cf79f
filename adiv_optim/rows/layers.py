"""The layers whose rows are known, the corrected layers that `attach` puts in their place, and weight layouts.

Corrected layers can be imported by name, so an attached model can be copied, and pickled without parametrizations.
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

from .._torch import plain_tensor
from ..corrections import Correction
from ..functional.convolutions import corrected_conv
from ..functional.linears import corrected_linear


class Corrected:
    """The base of every corrected layer; its whole state is these entries of the instance's __dict__."""

    _correction: Correction
    _label: str  # for error messages: the layer's path in the model
    _ran: bool  # for `coverage`

    def _run(self, function: Callable[..., Tensor], input: Tensor, *arguments: Any) -> Tensor:
        # Only written: a read would make torch.compile guard on it and compile twice. And not by setattr, which looks
        # among parameters, buffers and modules first: that costs a small layer 5 %.
        if torch.is_grad_enabled():
            self.__dict__["_ran"] = True
        plain = plain_tensor(input)
        output = function(self._label, plain, *arguments, self._correction)
        # As torch's own functions do, return the input's subclass.
        return output if plain is input else output.as_subclass(type(input))

    def _replicate_for_data_parallel(self) -> Any:
        """Count the layer as run: nn.DataParallel, which calls this, runs replicas in its place."""
        self._ran = True
        return super()._replicate_for_data_parallel()  # type: ignore[misc]

    def extra_repr(self) -> str:
        """Return the line of the plain layer, and the correction."""
        return f"{super().extra_repr()}, correction={self._correction!r}"  # type: ignore[misc]


class CorrectedAffine(Corrected):
    """A linear layer of another package, with a weight of shape (out_features, in_features): z = Wx + b."""

    def forward(self: Any, input: Tensor) -> Tensor:
        """Return Wx + b; see `functional.linear`."""
        return self._run(corrected_linear, input, self.weight, getattr(self, "bias", None))


class CorrectedLinear(CorrectedAffine, nn.Linear):
    """nn.Linear through `functional.linear`; made by `attach`, not by hand."""


class CorrectedTransposed(Corrected):
    """The same, with a weight of shape (in_features, out_features): z = xW + b."""

    def forward(self: Any, input: Tensor) -> Tensor:
        """Return xW + b; see `functional.linear`."""
        return self._run(corrected_linear, input, self.weight.mT, getattr(self, "bias", None))

    def __repr__(self: Any) -> str:  # as transformers prints its layer
        features, outputs = self.weight.shape
        return f"{type(self).__name__}(nf={outputs}, nx={features}, correction={self._correction!r})"


class CorrectedConv(Corrected):
    """The base of the corrected convolutions."""

    def _conv_forward(self: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padding = self.padding
        if self.padding_mode != "zeros":
            input, padding = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode), 0
        args = self.stride, padding, self.dilation, self.groups
        return self._run(corrected_conv, input, weight, bias, args, len(self.kernel_size))


class CorrectedConv1d(CorrectedConv, nn.Conv1d):
    """nn.Conv1d through `functional.conv1d`; made by `attach`, not by hand."""


class CorrectedConv2d(CorrectedConv, nn.Conv2d):
    """nn.Conv2d through `functional.conv2d`; made by `attach`, not by hand."""


class CorrectedConv3d(CorrectedConv, nn.Conv3d):
    """nn.Conv3d through `functional.conv3d`; made by `attach`, not by hand."""


#: Plain layer → its replacement. Exact types only: a subclass may compute something else in its forward.
CORRECTED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: CorrectedLinear,
    nn.Conv1d: CorrectedConv1d,
    nn.Conv2d: CorrectedConv2d,
    nn.Conv3d: CorrectedConv3d,
}
PLAIN = {corrected: plain for plain, corrected in CORRECTED.items()}

#: Modules of other packages → the module of this package that registers their layers.
_REGISTERED_BY = {"transformers.pytorch_utils": ".transformers"}


def register(plain: type[nn.Module], corrected: type[nn.Module]) -> None:
    """Let corrections, and wrappers that measure inputs, treat a layer of another package.

    Args:
        plain: the layer's class. Instances of its subclasses stay plain.
        corrected: the class that `attach` puts in its place, which inherits from it, and before it from
            `CorrectedLinear` if it is an nn.Linear, `CorrectedAffine` if it computes xWᵀ + b otherwise, or
            `CorrectedTransposed` if xW + b. Define it at the top of a module, where pickles find it.

    Raises:
        TypeError: `corrected` is no such class, or inherits in another order, in which the plain forward would run.

    Example:
        >>> from torch import nn
        >>> from adiv_optim import Proportional, attach
        >>> from adiv_optim.rows import CorrectedLinear, register
        >>> class Head(nn.Linear):
        ...     "A linear layer by another name."
        >>> class CorrectedHead(CorrectedLinear, Head):
        ...     "The same through `functional.linear`."
        >>> register(Head, CorrectedHead)
        >>> attach(Head(2, 3), Proportional())
        CorrectedHead(in_features=2, out_features=3, bias=True, correction=Proportional(eps=1e-12))
    """
    if not isinstance(plain, type) or not isinstance(corrected, type):
        raise TypeError("register takes two classes, the layer's own and the corrected one, and no instances.")
    bases = corrected.__mro__
    is_ordered = Corrected in bases and plain in bases and bases.index(Corrected) < bases.index(plain)
    if not is_ordered or (nn.Linear in bases and not issubclass(plain, nn.Linear)):
        base = "CorrectedLinear" if issubclass(plain, nn.Linear) else "CorrectedAffine or CorrectedTransposed"
        raise TypeError(
            f"register: {corrected.__name__} must inherit from {base} and from {plain.__name__}, in that order."
        )
    CORRECTED[plain], PLAIN[corrected] = corrected, plain


def corrected_type(kind: type) -> type[nn.Module] | None:
    """Return the replacement of a plain layer's class, or None if corrections do not know it."""
    if module := _REGISTERED_BY.get(kind.__module__):
        importlib.import_module(module, __package__)
    return CORRECTED.get(kind)


class Layout(NamedTuple):
    """How a layer's parameters are viewed as matrices, one for each group, with one row for each output."""

    transposed: bool  # whether the weight has one column, not one row, for each output
    groups: int

    @classmethod
    def of(cls, module: nn.Module) -> "Layout":
        """Return the layout of a layer's weight and bias."""
        # Corrected or not; the weight of a transposed one is (in_features, out_features).
        transposed = issubclass(corrected_type(plain_type(module)) or nn.Module, CorrectedTransposed)
        return cls(transposed, int(getattr(module, "groups", 1)) if isinstance(module, _ConvNd) else 1)

    def features(self, weight: Tensor) -> int:
        """Return how many features a row of the layer has on this process."""
        return len(weight) if self.transposed else weight.shape[1:].numel()


def plain_type(module: nn.Module) -> type:
    """Return a module's type without the classes that parametrize, fully_shard and `attach` put over it."""
    kind = type(module)
    for _ in range(parametrize.is_parametrized(module) + hasattr(module, "_get_fsdp_state")):
        kind = kind.__bases__[-1]
    return PLAIN.get(kind, kind)


def why_unknown_rows(layer: nn.Module) -> str:
    """Say why a layer may multiply its weight with other rows than those of its input, or ""."""
    kind = plain_type(layer)
    if "forward" in layer.__dict__:
        return f"this {kind.__name__} has a forward of its own set on it"
    if corrected_type(kind):
        return ""
    base = next((base for base in CORRECTED if issubclass(kind, base)), None)
    if base is None:
        return f"{type_name(kind)} is not a layer whose rows are known"
    return f"{type_name(kind)} is a subclass of {base.__name__}, whose weight may multiply something else"


def is_from_torch(kind: type) -> bool:
    """Whether a class is defined by torch."""
    return kind.__module__.startswith("torch.")


def type_name(kind: type) -> str:
    """Return a class's name; with its module if it is not torch's, since other packages use the same names."""
    return kind.__name__ if is_from_torch(kind) else f"{kind.__module__}.{kind.__qualname__}"
