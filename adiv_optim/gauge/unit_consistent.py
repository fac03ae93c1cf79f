"""An optimizer around another one, whose path no rescaling of hidden units can change."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import _device
from .._checks import describe
from .._device import addresses
from .._distributed import why_not_one_cut
from ..optim.mapped import Mapped
from ..optim.measurements import Measurements
from ..optim.parameters import check_model, unwrapped
from ..optim.roots import Scales
from ..optim.step import Stack
from ..optim.wrapper import OURS
from ..rows.models import FSDP1_REMEDY, IN_SKIP, Coverage, Skip, listed, named_in_skip, overlaps, refuse_sharded
from .gauges import NetworkGauge
from .graph import ChannelGraph, Factors
from .network import network_scales
from .tracing import trace


class ChannelScales(Measurements):
    """The scales of a model's channels, W = D W' E, measured by its weights; see `UnitConsistent` for the arguments."""

    name, prefix = "UnitConsistent", f"{OURS}scales."
    remedy = (
        "Only functions with f(cx) = c f(x), as ReLU and leaky ReLU, leave scales free: use those, or the optimizer "
        "without UnitConsistent. "
    )

    def __init__(self, model: nn.Module, graph: ChannelGraph, gauge: NetworkGauge, skip: Skip) -> None:
        self.model, self.graph, self.gauge, self.steps = model, graph, gauge, 0
        self.settings = {"gauge": gauge, "skip": skip}
        #: Kept, as between a forward and its backward the modules of fully_shard hold others.
        self.parameters = dict(model.named_parameters())
        skipped = {id(parameter) for module in named_in_skip(model, skip) for parameter in module.parameters()}
        self.skipped = {name for name, parameter in self.parameters.items() if id(parameter) in skipped}
        #: By id, why a parameter that shares memory takes the plain step; and the addresses by which that was found.
        self._overlaps, self._addresses = dict[int, str](), list[Any]()
        self.measurements = 0
        self._log_scales = torch.zeros(graph.free, dtype=torch.float64, device="cpu")
        self._factors: dict[str, Factors] = {}

    def find(self, groups: Sequence[Mapping[str, Any]]) -> None:
        # All of the model's parameters have scales, whichever the optimizer holds, but those that share memory.
        if (now := addresses(self.parameters.values())) != self._addresses:
            self._addresses, self._overlaps = now, overlaps(self.parameters)

    def stacks(self) -> list[Stack]:
        # A stack for each parameter that has scales and a gradient, as one may have that was frozen since.
        if self.steps % self.gauge.every == 0 or not self._factors:
            self._measure()
        stacks = []
        for name, factors in self._factors.items():
            parameter = self.parameters[name]
            if name in self.skipped or parameter.grad is None or id(parameter) in self._overlaps:
                continue
            if parameter.grad.is_sparse:
                raise ValueError(
                    f"UnitConsistent: the gradient of {name!r} is sparse; build the layer without sparse=True, or name "
                    "it in skip."
                )
            # Scales keep their own precision: those of float16 weights may lie outside of float16's range.
            factors, dtype = factors.of_shard(parameter), _device.wide_dtype(parameter)
            scales = Scales([part.to(parameter.device, dtype) for part in (factors.d, factors.e)], factors.shape)
            stacks.append(Stack([parameter], [scales]))
        return stacks

    def _measure(self) -> None:
        # From the scales of the last measurement on one pass over the weights is enough.
        self._log_scales = network_scales(self.graph, self.parameters, start=self._log_scales)
        self.measurements += 1
        self._factors = self.gauge.factors(self.graph, self.parameters, self._log_scales)

    def coverage(self) -> Coverage:
        treatments = self.gauge.treatments(self.graph)
        # Not those that took the place of a traced one.
        parameters = [(name, p) for name, p in self.model.named_parameters() if self.parameters.get(name) is p]
        skipped = {name: why for name, p in parameters if (why := self._why_plain(name, p, treatments))}
        return Coverage({name: treatments[name] for name, _ in parameters if name not in skipped}, skipped)

    def _why_plain(self, name: str, parameter: nn.Parameter, treatments: Collection[str]) -> str:
        if not parameter.requires_grad:
            return "frozen"
        if name in self.skipped:
            return IN_SKIP
        if why := self._overlaps.get(id(parameter)):
            return why
        if name in treatments:
            return ""
        if name in self.graph.parameters:
            return f"pinned: {'; '.join(self.graph.parameters[name].why[:2])}"
        return "not used by the traced call" if name in self.graph.unused else "not in the graph"

    def metrics(self) -> dict[str, float]:
        if not (self.measurements or self._factors):
            return {}
        metrics = {"measurements": float(self.measurements), "free_scales": float(self.graph.free)}
        if self.graph.free:
            metrics |= {"log_scale_min": float(self._log_scales.min()), "log_scale_max": float(self._log_scales.max())}
        return metrics

    def remembered(self) -> dict[Tensor, dict[str, Any]]:
        # The scales in use, and the log-scales from which the next measurement starts, with that of the pinned channel.
        factors = self._factors or self.gauge.factors(self.graph, self.parameters, self._log_scales)
        log_scales = torch.cat([self._log_scales.new_zeros(1), self._log_scales])
        remembered: dict[Tensor, dict[str, Any]] = {}
        for name, (_, d, e) in factors.items():
            plus, minus = (log_scales[side.to(log_scales.device)] for side in self.graph.parameters[name].sides)
            remembered[self.parameters[name]] = {"d": d, "e": e, "plus": plus, "minus": minus}
        return remembered

    def load(self, remembered: Mapping[Tensor, Mapping[str, Any]]) -> None:
        log_scales = self._log_scales.new_zeros(self.graph.free + 1)
        self._factors, self._log_scales = {}, log_scales[1:]
        for name, parameter in self.parameters.items():
            saved = remembered.get(parameter, {})
            if "d" not in saved:
                continue
            entry = self.graph.parameters[name]
            for side, of_side in zip(entry.sides, ("plus", "minus"), strict=True):
                log_scales[side.to(log_scales.device)] = saved[of_side].to(log_scales)
            self._factors[name] = Factors(entry.shape, saved["d"].clone(), saved["e"].clone())
        if self._factors:  # those of parameters that the checkpoint lacks follow from channels of others, or are 1
            self._factors = self.gauge.factors(self.graph, self.parameters, self._log_scales) | self._factors


class UnitConsistent(Mapped):
    r"""Let any optimizer step in coordinates that rescaling hidden units cannot touch.

    A network of ReLUs, convolutions, residual connections and the like is the same function after a hidden unit's
    incoming weights are multiplied by s and its outgoing ones divided by s; SGD and Adam nevertheless take another
    path then. This wrapper writes every weight as :math:`W = D W' E` with D and E by a gauge, lets the optimizer step
    on W' with the gradient :math:`D G E`, and maps the step back. For plain SGD that is

    .. math:: W \leftarrow W - \eta\, D^2 G E^2, \qquad b \leftarrow b - \eta\, D^2 g_b

    (Uhlmann, *Unit-Consistent (UC) Adjoint for GSD and Backprop in Deep Learning Applications*; biases by the scales of
    the network's channels; one whose weights are all 0 keeps its last scale, 1 at first). Two networks that differ by
    such rescalings of other channels, and only by them, stay so: to rounding, for SGD, momentum, Nesterov, Adam, AdamW
    and any optimizer whose update needs only p and p.grad. Decoupled and coupled weight decay act on W', and the
    optimizer's state is of W'. Gradient clipping before the step acts on the plain gradient and breaks the equivalence.
    Running statistics of BatchNorm are left to the model. In a network of GELU, SiLU or Tanh alone the network gauge
    leaves every step plain; `coverage()` says why.

    Args:
        optimizer: any torch.optim.Optimizer but LBFGS.
        model: the model, also within DistributedDataParallel or torch.compile. Parameters that the trace did
            not meet, or that no scale touches, take the plain step.
        gauge: `gauge.NetworkGauge()` (default) or `gauge.LayerGauge()`; see there for learning rates.
        example_input: an input of the model, to trace it, as for `gauge.trace`. Not needed with a `graph`.
        graph: from `gauge.trace`, if it is there already; needed of a sharded model, traced before it was sharded.
        skip: paths of modules and module types whose parameters take the plain step, as for `attach`. Their weights
            count towards the scales of the others all the same.

    Raises:
        TypeError: not an optimizer, LBFGS, or not a gauge.
        ValueError: neither example_input nor graph, a model that cannot be traced, parameters that FSDP1 has flattened
            or that are cut along two dimensions of a mesh, `skip` names none of the modules, or in `step` a weight that
            holds NaN or inf; the weights are then as they were.

    Example:
        >>> import torch
        >>> from torch import Tensor, nn
        >>> from adiv_optim import UnitConsistent
        >>> def trained(scale):
        ...     model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False)).double()
        ...     model[0].weight.data = scale * torch.tensor([[1.0, 2.0]]).double()
        ...     model[2].weight.data = torch.tensor([[3.0]]).double() / scale
        ...     x = torch.tensor([[1.0, 1.0]]).double()
        ...     opt = UnitConsistent(torch.optim.SGD(model.parameters(), lr=0.01), model, example_input=x)
        ...     model(x).square().sum().backward()
        ...     opt.step()
        ...     return round(model(x).item(), 9)
        >>> trained(1.0) == trained(1000.0)
        True
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        gauge: NetworkGauge | None = None,
        example_input: Any = None,
        graph: ChannelGraph | None = None,
        skip: Skip = (),
    ) -> None:
        gauge = NetworkGauge() if gauge is None else gauge
        if not isinstance(gauge, NetworkGauge):
            raise TypeError(f"UnitConsistent: gauge is {gauge!r}; pass gauge.NetworkGauge() or gauge.LayerGauge().")
        check_model("UnitConsistent", model)
        model = unwrapped(model)  # torch.export cannot look into wrappers around it
        refuse_sharded("UnitConsistent", model, FSDP1_REMEDY, only_flat=True)
        for name, parameter in model.named_parameters():
            if why := why_not_one_cut(parameter):
                raise ValueError(
                    f"UnitConsistent: {name!r} is sharded as {getattr(parameter, 'placements', ())}, {why}; cut it "
                    "once, by fully_shard or by parallelize_module alone."
                )
        if graph is None:
            if example_input is None:
                raise ValueError("UnitConsistent: pass example_input, what the model is called with, to trace it.")
            graph = trace(model, example_input)
        if not isinstance(graph, ChannelGraph):
            raise TypeError(f"UnitConsistent: graph is {describe(graph)}; pass trace's, or an input as example_input.")
        graph.check(dict(model.named_parameters()), graph.parameters)
        skip = listed(skip)
        super().__init__(optimizer, ChannelScales(model, graph, gauge, skip))
