"""The base of optimizers whose method measures the inputs of a model's layers."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from .._linalg.limits import check_count, check_not_negative
from .._linalg.shards import DataParallelGroup, cut_of, why_not_one_cut
from ..attach.checks import SHARED_MEMORY, addresses, named_in_skip, refuse_sharded
from ..attach.layers import Layout, plain_type
from .eligible_layers import eligible_layers
from .input_hooks import LayerInputs
from .input_method import InputMethod
from .reparametrized import UNFLATTENED, Reparametrized


class ByInputs(Reparametrized):
    """An optimizer whose steps are measured by the inputs of the layers they are taken in; see `Whitened`."""

    def __init__(self, optimizer: Optimizer, model: nn.Module, method: InputMethod) -> None:
        name = type(self).__name__
        check_not_negative(name, decay=method.decay)
        if method.decay >= 1:
            raise ValueError(f"{name}: decay is {method.decay}; it must be at least 0 and below 1.")
        check_count(name, every=method.every)
        _refuse_private(name, optimizer)
        super().__init__(optimizer, model, method)
        refuse_sharded(name, model, UNFLATTENED, only_flat=True)
        named_in_skip(model, method.skip)
        self._find_layers()
        reasons = "; ".join(f"{path} ({why})" for path, why in list(method.plain.items())[:5])
        if not method.layers and not any(why.startswith(SHARED_MEMORY) for why in method.plain.values()):
            raise ValueError(
                f"{name}: no tensor the optimizer holds is the weight of a layer whose rows are known: {reasons}."
            )
        self._warn_of_little()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; the rows that they have come to do not count any more."""
        super().zero_grad(set_to_none)
        for layer in self.method.layers:
            layer.drop()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the inner optimizer, and measure the layers that it brings."""
        super().add_param_group(param_group)
        self._find_layers()

    @torch.compiler.disable
    def _inner_step(self, **kwargs: Any) -> None:
        _refuse_private(type(self).__name__, self)
        # Layers may be unfrozen one after the other, pruned, or put into the memory of others.
        if isinstance(self.method, InputMethod) and self.method.trained != self._trained():
            self._find_layers()
        super()._inner_step(**kwargs)

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
        found = next((each for each in self.method.layers if any(layer is module for module in each.modules)), None)
        if found is not None:
            if found.armed:
                found.add(layer, rows, None, bias_entry=0)
        elif not self.detached:
            path = next((path for path, module in self.model.named_modules() if module is layer), type(layer).__name__)
            raise ValueError(
                f"{type(self).__name__}.count_rows: {path!r} is no layer that it measures; coverage() lists those, and "
                "why it leaves others alone."
            )

    def detach(self) -> nn.Module:
        """Take the hooks off the model, and plain steps from now on; see `Reparametrized.detach`."""
        for layer in self.method.layers:
            layer.remove_hooks()
        return super().detach()

    def _trained(self) -> list[Any]:
        """The optimizer's parameters, each with where it is and whether it trains."""
        return addresses(p for group in self.param_groups for p in group["params"])

    def _find_layers(self) -> None:
        """Let the method know which weights it is to measure the inputs of, and why it leaves others alone."""
        method, name = self.method, type(self).__name__
        if not isinstance(method, InputMethod):
            return  # detached
        found, plain = eligible_layers(name, self.model, self, method.skip, method.bias_is_plain)
        # A layer that has been replaced leaves its record behind under the same name: the weight tells them apart.
        known = {(layer.name, id(layer.weight)): layer for layer in method.layers}

        def layer_of(path: str, modules: list[nn.Module], with_bias: bool) -> LayerInputs:
            old = known.get((path, id(modules[0].get_parameter("weight"))))
            if old is not None and old.modules == modules and old.with_bias == with_bias:
                return old
            new = LayerInputs(path, modules, with_bias, method.moments(modules[0], with_bias))
            new.turn = method.steps
            return new

        layers = [layer_of(*each) for each in found]
        _refuse_shards(name, layers, method.process_group)
        group_of = {id(p): place for place, group in enumerate(self.param_groups) for p in group["params"]}
        for layer in layers:
            layer.groups = tuple(group_of[id(p)] for p in layer.parameters)
        kept = {layer.name for layer in layers if layer in method.layers}
        method.measured = {path: value for path, value in method.measured.items() if path in kept}
        method.layers, method.plain, method.trained = layers, plain, self._trained()


def _refuse_private(name: str, optimizer: Any) -> None:
    """Raise a ValueError where Opacus makes the gradients: no noise hides what is remembered of private inputs."""
    if any(hasattr(p, "grad_sample") for group in getattr(optimizer, "param_groups", ()) for p in group["params"]):
        raise ValueError(
            f"{name} measures inputs, and keeps what it measured without noise, so that the ε which Opacus reports "
            "would not hold for its steps. With differential privacy take the optimizer without it, or "
            "DPOptimizer(UnitConsistent(…), …), which reads weights alone."
        )


def _refuse_shards(what: str, layers: Iterable[LayerInputs], processes: DataParallelGroup) -> None:
    """Raise a ValueError if parts of a layer are not whole rows, or are held by processes whose rows do not count.

    A map of columns takes whole rows, all of an output's weights, and which of them is no matter. With groups, or a
    column for each output, what is cut along dimension 0 is no such rows.
    """
    for layer in layers:
        mesh: Any = getattr(layer.weight, "device_mesh", None)
        placed = [getattr(parameter, "placements", "a whole") for parameter in layer.parameters]
        cut, plain = cut_of(layer.weight), layer.layout == Layout(transposed=False, groups=1)
        if any(map(why_not_one_cut, layer.parameters)) or placed[0] != placed[-1] or (cut and (cut.dim or not plain)):
            raise ValueError(
                f"{what}: {layer.name!r} of a {plain_type(layer.modules[0]).__name__} is sharded as "
                f"{' with its bias as '.join(map(str, placed))}, which is no whole rows of outputs that read one "
                "input; cut both along dimension 0 by fully_shard alone, which is its default, or name this layer in "
                "skip, as one must with groups of a convolution or a column for each output."
            )
        if mesh is None:
            continue
        counted = distributed.get_process_group_ranks(processes.group or distributed.group.WORLD)
        if missing := sorted({*mesh.mesh.flatten().tolist()}.difference(counted)):
            raise ValueError(
                f"{what}: ranks {missing} hold a part of {layer.name!r} and are not in process_group; what it reads "
                "must be added up over all of its mesh: give a group that has them, or leave process_group=None."
            )
