"""The base of optimizers that measure the inputs of a model's layers: which layers those are, and checkpoints."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._linalg.limits import check_count, check_not_negative
from ..attach.checks import NAMED, bypassed, named_in_skip, refuse_flat, refuse_lazy
from ..attach.coverage import warn
from .averages import Averages
from .coordinates import UNFLATTENED, Coordinates
from .input_chart import InputChart
from .rows import FROZEN, why_not_rows
from .shards import bias_of_columns, managed_by_fsdp, refuse_shards, why_replicated
from .sums import InputSums


class ByInputs(Coordinates):
    """An optimizer whose steps are measured by the inputs of the layers they are taken in; see `Whitened`.

    Args:
        optimizer: any torch.optim.Optimizer but LBFGS.
        model: the model.
        chart: what is measured.
    """

    chart: InputChart[Any, Any]

    def __init__(self, optimizer: Optimizer, model: nn.Module, chart: InputChart[Any, Any]) -> None:
        name = type(self).__name__
        check_not_negative(name, decay=chart.decay)
        if chart.decay >= 1:
            raise ValueError(f"{name}: decay is {chart.decay}; it must be at least 0 and below 1.")
        check_count(name, every=chart.every)
        super().__init__(optimizer, model, chart)
        refuse_flat(name, model, UNFLATTENED)
        left = named_in_skip(model, chart.skip)
        self._find_layers()
        reasons = "; ".join(f"{path} ({why})" for path, why in list(chart.plain.items())[:5])
        if not chart.layers:
            raise ValueError(
                f"{name}: no tensor the optimizer holds is the weight of a layer whose rows are known: {reasons}."
            )
        skipped = {id(p) for module in left for p in module.parameters(recurse=False)}
        held = [p for group in self.param_groups for p in group["params"] if id(p) not in skipped]
        trained = sum(p.numel() for p in held if p.requires_grad)
        if 2 * sum(p.numel() for layer in chart.layers for p in layer.parameters) < trained:
            warn(
                f"{name} treats less than half of the elements of {type(model).__name__} that the optimizer holds; the "
                f"others take plain steps: {self.coverage().reasons()}. coverage() lists every parameter."
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; rows seen before the next forward pass do not count any more."""
        super().zero_grad(set_to_none)
        for layer in self._layers():
            layer.dropped = layer.seen

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the inner optimizer, and treat the layers that it brings; neither after an error."""
        super().add_param_group(param_group)
        try:
            self._find_layers()
        except Exception:
            super()._drop_group()  # the layers are those of before
            raise

    def _drop_group(self) -> None:
        super()._drop_group()
        self._find_layers()

    @torch.compiler.disable
    def _inner_step(self) -> None:
        if isinstance(self.chart, InputChart) and any(p.requires_grad for p in self.chart.frozen.values()):
            self._find_layers()  # layers are unfrozen one after the other, as in fine-tuning
        super()._inner_step()

    def count_rows(self, layer: nn.Module, rows: Tensor) -> None:
        r"""Count further rows of a layer by hand, with 0 in the place of the bias's 1.

        A loss on derivatives of a network by its inputs, as of a physics-informed one, multiplies the weight by rows of
        derivatives as well: :math:`\partial(Wx + b) = W \partial x`. KFAC for PINNs (Dangel et al. 2024,
        arXiv 2405.15603) counts these beside the rows x~. Call it beside the forward pass; it does nothing before
        steps that do not measure. A layer that shares its covariance with others has its own from then on.

        Args:
            layer: a layer of the model.
            rows: (…, in_features), or what a convolution reads; not differentiated.

        Raises:
            ValueError: the optimizer does not measure this layer.

        Example:
            >>> import torch
            >>> from adiv_optim import Whitened
            >>> layer, x = torch.nn.Linear(2, 1), torch.rand(5, 2)
            >>> opt = Whitened(torch.optim.Adam(layer.parameters()), layer)
            >>> slopes = layer.weight.expand(5, 2)  # ∂u/∂x; x itself has the derivatives (1, 0) and (0, 1)
            >>> opt.count_rows(layer, torch.eye(2).expand(5, 2, 2))
            >>> (layer(x).square().mean() + (slopes - 1).square().mean()).backward()
            >>> opt.step()
        """
        found = next((each for each in self._layers() if any(layer is module for module in each.modules)), None)
        if found is not None:
            if found.armed:
                found.add(layer, rows, one=0)
        elif isinstance(self.chart, InputChart):
            path = next((path for path, module in self.model.named_modules() if module is layer), type(layer).__name__)
            raise ValueError(
                f"{type(self).__name__}.count_rows: {path!r} is no layer that it measures; coverage() lists those, and "
                "why it leaves others alone."
            )

    @property
    def averages(self) -> Averages:
        """The averages, for torch.distributed.checkpoint, whose get_state_dict knows torch's own states alone.

        Save and load it beside what get_state_dict returns: `{"model": …, "optimizer": …, "averages": opt.averages}`.
        Another number of processes may load what some have saved.
        """
        if not isinstance(self.chart, InputChart):
            raise RuntimeError(f"{type(self).__name__} is detached, and remembers nothing; save what is inside of it.")
        return Averages(self.chart)

    def detach(self) -> nn.Module:
        """Take the hooks off the model; the optimizer goes on with plain steps."""
        for layer in self._layers():
            layer.remove_hooks()
        return super().detach()

    def _layers(self) -> list[InputSums]:
        return self.chart.layers if isinstance(self.chart, InputChart) else []  # once detached there are none

    def _find_layers(self) -> None:
        """Let the chart know which weights it is to measure the inputs of, and why it leaves others alone."""
        chart = self.chart
        if not isinstance(chart, InputChart):
            return  # detached
        skipped = named_in_skip(self.model, chart.skip, gone=True)
        refuse_lazy(type(self).__name__, self.model, skipped)
        held = {id(p) for group in self.param_groups for p in group["params"]}
        managed = managed_by_fsdp(self.model)
        users: dict[int, list[nn.Module]] = {}
        named: dict[int, tuple[str, nn.Parameter]] = {}
        without_call = bypassed(self.model)
        for path, module in self.model.named_modules():
            for name, parameter in module.named_parameters(prefix=path, recurse=False):
                if id(parameter) in held:
                    users.setdefault(id(parameter), []).append(module)
                    named.setdefault(id(parameter), (name, parameter))
        # A layer that has been replaced leaves its record behind under the same name: the weight tells them apart.
        known = {(layer.name, id(layer.weight)): layer for layer in chart.layers}
        layers, plain, plain_biases = [], {}, {}
        chart.frozen = {}
        for key, modules in users.items():
            name, parameter = named[key]
            layer = known.pop((name, key), None)
            layer = layer if layer is not None and layer.modules == modules else None
            ignored = [without_call[module] for module in modules if module in without_call]
            why = NAMED if not skipped.isdisjoint(modules) else next(iter(ignored), "")
            why = why or why_not_rows(name, parameter, modules) or why_replicated(parameter, modules, managed)
            if why == FROZEN and layer is not None:
                why = ""  # for a while: it has been treated
            if why == FROZEN:
                chart.frozen[name] = parameter
            if why:
                plain[key] = why
                continue
            bias = getattr(modules[0], "bias", None)  # a layer with `input_rows` may have none
            trains = isinstance(bias, nn.Parameter) and (bias.requires_grad or (layer is not None and layer.with_bias))
            with_bias = trains and users.get(id(bias)) == modules
            if with_bias and (why := chart.bias_is_plain or bias_of_columns(parameter)):
                plain_biases[id(bias)], with_bias = why, False
            if not parameter.numel() and not with_bias:
                plain[key] = "without entries"
                continue
            if layer is None or layer.with_bias != with_bias:
                layer = chart.sums(name, modules, with_bias)
            layers.append(layer)
        for layer in layers:
            plain.pop(id(layer.bias), None)
        plain.update(plain_biases)
        groups = chart.process_group if chart.synchronize else None
        chart.alone = refuse_shards(type(self).__name__, managed, layers, groups)
        fresh = {layer.name for layer in layers} - {layer.name for layer in chart.layers if layer in layers}
        chart.measured = {name: value for name, value in chart.measured.items() if name not in fresh}
        chart.layers, chart.plain = layers, {named[key][0]: why for key, why in plain.items()}
        for layer in layers:
            chart.recall(layer)
