"""The running covariance of a layer's inputs, gathered in the forward pass without keeping activations."""

import weakref
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch._subclasses.fake_tensor import FakeTensor

from .._linalg.roots import Spectrum, leading
from ..attach.rows import patches_of
from ..functional.linears import gram_of
from ..functional.shared import exporting, refuse_capture
from .checkpoint import NUMBER, POSITIVE, Maybe, check, numbers
from .rows import features_of


class InputCovariance:
    r"""A = mean of :math:`\tilde x \tilde x^\top` over the rows that a layer reads, x~ = (x, 1) where a bias trains.

    One for each weight: modules that share one add their rows up. Wide layers keep diagonal blocks of A only.
    """

    def __init__(
        self, name: str, modules: list[nn.Module], with_bias: bool, rank: int | None, max_dim: int | None
    ) -> None:
        self.name, self.modules, self.with_bias, self.rank = name, modules, with_bias, rank
        self.blocks = _blocks(features_of(modules[0]), with_bias, max_dim)
        #: Whether forward passes are counted now.
        self.armed = True
        self.reset()
        self._register()

    def reset(self) -> None:
        """Forget everything."""
        self.forget_pending()
        #: Sums over rows with the weights decay^age, one tensor (groups, d, d) for each block, and the rows' own sum.
        self.total: list[Tensor] | None = None
        self.rows = 0.0
        #: The leading eigenvectors of every block, or None where they are not followed.
        self.spectra: list[Spectrum | None] = [None for _ in self.blocks]

    def forget_pending(self) -> None:
        """Drop what forward passes have left since the last measurement."""
        self.pending: list[Tensor] | None = None
        self.pending_rows = 0
        #: Whether zero_grad was called since: the next forward pass then begins anew, unless gradients have come.
        self.dropped = False

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "remove_hooks"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._register()

    def _register(self) -> None:
        hook = _Hook(self)
        for module in self.modules:
            for key, old in list(module._forward_pre_hooks.items()):
                if isinstance(old, _Hook) and old.covariance() is None:  # came with a copy of the model
                    module._forward_pre_hooks.pop(key)
                    module._forward_pre_hooks_with_kwargs.pop(key, None)
        handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in self.modules]
        #: Takes the hooks off the model; so does the end of this object.
        self.remove_hooks = weakref.finalize(self, _remove_all, handles)

    @property
    def weight(self) -> nn.Parameter:
        """The weight."""
        return self.modules[0].get_parameter("weight")

    @property
    def bias(self) -> nn.Parameter | None:
        """The bias, if x~ has a 1."""
        return self.modules[0].get_parameter("bias") if self.with_bias else None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Weight and bias, if x~ has a 1."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    @property
    def groups(self) -> int:
        """How many covariances there are beside each other."""
        return int(getattr(self.modules[0], "groups", 1))

    @property
    def sizes(self) -> list[int]:
        """Columns of every block, the 1 included."""
        sizes = [block.stop - block.start for block in self.blocks]
        sizes[-1] += self.with_bias
        return sizes

    @property
    def dtype(self) -> torch.dtype:
        """What sums and roots are kept in."""
        return torch.promote_types(self.weight.dtype, torch.float32)

    def no_rows(self) -> list[Tensor]:
        """What a process adds whose batch did not reach the layer."""
        device = self.weight.device
        return [torch.zeros(self.groups, size, size, dtype=self.dtype, device=device) for size in self.sizes]

    @torch.compiler.disable
    @torch.no_grad()
    def add(self, module: nn.Module, input: Tensor) -> None:
        """Count the rows of one forward pass."""
        if isinstance(input, FakeTensor):
            return
        if _functorch.is_functorch_wrapped_tensor(input):
            if not module.training:
                return  # a diagnosis, whose gradients no step will see
            raise RuntimeError(
                f"{self.name}: the optimizer remembers the inputs of this layer, which a transform of torch.func would "
                "have to carry outside; call the transform in eval(), or detach() the optimizer first."
            )
        if self.dropped and (self.weight.grad is None or not bool(self.weight.grad.any())):
            self.forget_pending()
        with torch.autocast(input.device.type, enabled=False):
            for _, rows in patches_of(module, input).parts(self.dtype):
                ones = rows.new_ones(*rows.shape[:-1], 1)
                columns = [[rows[..., block]] for block in self.blocks]
                columns[-1] += [ones] * self.with_bias
                grams = [gram_of(block, block) for block in columns]
                self.pending_rows += rows.shape[1]
                if self.pending is not None:
                    grams = [total.add_(gram) for total, gram in zip(self.pending, grams, strict=True)]
                self.pending = grams

    def absorb(self, decay: float) -> bool:
        """Let what was seen since the last time into the average, unless it holds NaN or inf; say whether it was.

        Raises:
            NoRootError: its leading eigenvectors could not be found; the average has been updated.
        """
        pending, rows = self.pending, self.pending_rows
        self.forget_pending()
        if pending is None or not rows or not bool(torch.stack([block.sum() for block in pending]).isfinite().all()):
            return False
        if self.total is not None and decay:
            # Made anew, not in place: a checkpoint may hold the old ones.
            pending = [block.add(old.to(block), alpha=decay) for block, old in zip(pending, self.total, strict=True)]
            self.rows *= decay
        else:
            self.rows = 0.0
        self.total = pending
        self.rows += rows
        self._follow()
        return True

    def mean(self) -> list[Tensor]:
        """The blocks of A, each (groups, d, d), or (d, d) of one group: some libraries batch on one thread."""
        return [(block if self.groups > 1 else block[0]) / self.rows for block in self.total or ()]

    def _follow(self) -> None:
        for number, (block, last) in enumerate(zip(self.mean(), self.spectra, strict=True)):
            if self.rank is not None and self.rank < block.shape[-1]:
                self.spectra[number] = leading(block, self.rank, last and last.vectors)

    def state_dict(self) -> dict[str, Any]:
        """Return the memory."""
        return {"total": self.total, "rows": self.rows, "spectra": [s and tuple(s) for s in self.spectra]}

    def check_state_dict(self, state: Any, path: str, remedy: str) -> None:
        """Raise a ValueError if the memory is of a layer of another size, or damaged; see `checkpoint.check`."""
        stack = (self.groups,) if self.groups > 1 else ()
        total = [numbers((self.groups, size, size)) for size in self.sizes]
        # As many eigenvectors as it likes: of another rank, they are found anew.
        spectra = [Maybe([numbers((*stack, None)), numbers((*stack, size, None))]) for size in self.sizes]
        check(state, {"total": Maybe(total), "rows": NUMBER, "spectra": spectra}, path, remedy)
        for place, found in enumerate(state["spectra"]):
            if found is not None:
                vectors = numbers((*found[1].shape[:-1], found[0].shape[-1]))
                check(found[1], vectors, f"{path}['spectra'][{place}][1]", remedy)
        if state["total"] is not None:
            check(state["rows"], POSITIVE, f"{path}['rows']", remedy)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the memory from a checkpoint."""
        self.reset()
        total, weight = state["total"], self.weight
        self.total = total and [block.to(weight.device, self.dtype) for block in total]
        self.rows = state["rows"]
        found = [s and Spectrum(*(part.to(weight.device, self.dtype) for part in s)) for s in state["spectra"]]
        if {s.values.shape[-1] for s in found if s} <= {self.rank}:
            self.spectra = found
        if total and self.rank is not None and not any(self.spectra):
            self._follow()  # the checkpoint is of another rank


class _Hook:
    """A forward pre-hook that belongs to a covariance and does nothing without it.

    A copy or a pickle of the model alone (an average of weights, a target network) does not copy the covariance.
    """

    def __init__(self, covariance: InputCovariance) -> None:
        self.covariance = weakref.ref(covariance)

    def __getstate__(self) -> dict[str, Any]:
        return {"covariance": type(None)}  # called, it returns None, as a weak reference to something gone does

    @property
    def __name__(self) -> str:
        # torch.jit.script asks every hook for its name before it compiles it.
        raise AttributeError(
            "an optimizer gathers what this layer reads by a hook, which cannot be scripted: detach() it"
        )

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        covariance = self.covariance()
        # Not module.training: fine-tuning under eval() is usual.
        if covariance is None or not torch.is_grad_enabled() or exporting():
            return
        # By whatever name: nn.Linear calls it input, transformers' Conv1D x.
        input = args[0] if args else next(iter(kwargs.values()))
        refuse_capture(covariance.name, input)
        if covariance.armed:
            covariance.add(module, input)


def _remove_all(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def _blocks(features: int, with_bias: bool, max_dim: int | None) -> list[slice]:
    """Nearly equal slices of the features, so that each, with the bias, stays within `max_dim`."""
    columns = features + with_bias
    count = 1 if max_dim is None else -(-columns // max_dim)
    ends = [*(columns * k // count for k in range(count)), features]
    return [slice(a, b) for a, b in pairwise(ends)]
