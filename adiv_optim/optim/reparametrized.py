"""Letting an optimizer step on other variables than the model's weights: the one driver of a step."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._linalg.limits import check_like
from ..attach.coverage import Coverage, warn
from ..attach.reports import meant, report
from ..functional.shared import refuse_capture, without_autocast
from .probe import refuse_unsuitable
from .snapshot import Snapshot, Transform, decay_factors, hooked, rests
from .wrapper import OURS, WAITING, OptimizerWrapper, check_same_parameters, ours, unwrapped

#: What to do where FSDP1 has flattened parameters.
UNFLATTENED = "use fully_shard, or GradientOnly, which goes with FSDP1"
#: What may be done about a checkpoint that does not fit.
_REMEDY = (
    "load what was saved of the same model with the same settings, or leave the names out that begin with "
    f"{OURS!r} to measure anew"
)

#: Why a layer is left alone in a step: mapping the steps of both would move the one that is to stay.
_ONE_RESTS = "of a layer's weight and bias one has a learning rate of 0; freeze that by requires_grad_(False)"


class Method:
    """What a wrapper measures, and the transforms that follow from it; this one has none."""

    #: How the names of what it remembers begin.
    prefix: ClassVar[str] = OURS
    #: Settings, whole numbers or None, that the shapes of what it remembers follow from.
    shaping: ClassVar[Sequence[str]] = ()
    #: Whether its transforms map weights too, or gradients alone.
    moves_weights: ClassVar[bool] = True
    #: Steps so far.
    steps = 0
    #: The layers whose inputs are measured.
    layers: Sequence[Any] = ()

    def transforms(self) -> Sequence[Transform]:
        """Measure if that is due, and return this step's transforms; other parameters take the plain step."""
        return ()

    def rescale(self, snapshots: Sequence["Snapshot"]) -> None:
        """Called when steps have been mapped back and not yet added: sums over processes belong here."""

    def after_step(self) -> None:
        """Count the step; the weights are the user's again."""
        self.steps += 1

    def coverage(self) -> Coverage:
        """Say of every trainable parameter how it is treated, or why it is not."""
        return Coverage()

    def treated_parameters(self) -> Collection[int] | None:
        """The ids of the parameters that `coverage` speaks of; None is whatever has the names now."""
        return None

    def why_inactive(self) -> str:
        """Say, after the second step, why nothing has been treated so far, with the remedy; "" if something has."""
        return ""

    def metrics(self) -> dict[str, float]:
        """Return what was measured last, as scalars for a logger."""
        return {}

    def settings(self) -> dict[str, Any]:
        """Return what it was built with, as the wrapper's repr shows it."""
        return {"detached": True}

    def state(self) -> dict[Tensor, dict[str, Any]]:
        """Return what it remembers of each parameter, with the same names and shapes before and after training.

        The values are tensors of their own, into which torch.distributed.checkpoint loads, and numbers.
        """
        return {}

    def load_state(self, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Take from a checkpoint what `state` gave, of some parameters or of none, which makes it forget."""


class Reparametrized(OptimizerWrapper):
    """An optimizer that steps on other variables than the model's weights; its state is about those too.

    The weights are mapped in place around the inner `step` and are the user's own outside of it. Whatever ends the
    step early, an error, a lack of memory or Ctrl-C, all gradients and all weights that are mapped then have their old
    values. Weights that are not, those of plain steps and all of `Preconditioned`, are where the inner optimizer left
    them, as without a wrapper.
    The inner optimizer may read p and p.grad and nothing else of the model. One that is known to read no weights finds
    zeros in their place. After the step p.grad is the gradient that it was before. The inner optimizer's own `step()`,
    called by hand, is a plain step.

    Args:
        optimizer: any torch.optim.Optimizer but LBFGS.
        model: the model whose parameters it steps on.
        method: makes the transforms.

    Raises:
        TypeError: not an optimizer, LBFGS, or one that differentiates gradients.
        ValueError: the optimizer holds no parameter of the model, holds another optimizer, keeps weights that its
            steps depend on, or is such a wrapper itself.
    """

    model: nn.Module
    method: Method
    #: The ids of the parameters of each group.
    _groups: Sequence[list[int]] = ()
    #: How the decays of the inner optimizer's groups act, as `decay_factors` has measured.
    _kinds: dict[Any, Any] | None = None

    def __init__(self, optimizer: Optimizer, model: nn.Module, method: Method) -> None:
        super().__init__(optimizer)
        check_same_parameters(type(self).__name__, optimizer, model)
        self._refuse_within()
        self.model, self.method = unwrapped(model), method
        refuse_unsuitable(type(self).__name__, optimizer, method.moves_weights)

    def _warn_of_little(self, remedy: str = "") -> None:
        """Warn if less than half of what the optimizer trains is treated."""
        found = meant(self.coverage())
        if found.elements and found.element_share < 0.5:
            warn(
                f"{type(self).__name__} treats less than half of the elements of {type(self.model).__name__} that the "
                f"optimizer holds; the others take plain steps: {found.reasons()}. {remedy}coverage() lists every "
                "parameter."
            )

    def _refuse_within(self) -> None:
        own, within = type(self).__name__, self.inner
        while isinstance(within, OptimizerWrapper):
            if isinstance(within, Reparametrized):
                raise ValueError(
                    f"{own} around {type(within).__name__}: the outer one would change what the inner one measures; "
                    "choose one."
                )
            within = within.inner
        if type(within).__name__ == "ZeroRedundancyOptimizer":
            raise ValueError(
                f"{own} around ZeroRedundancyOptimizer: from outside its weight decay cannot be told from its step, "
                "and inside each process would measure other layers. Shard weights and state by "
                f"torch.distributed.fsdp.fully_shard, and wrap any optimizer in {own}."
            )
        held = [value for value in vars(within).values() if isinstance(value, Optimizer)]
        if held:  # a chain has its optimizers in a tuple
            name, inside = type(within).__name__, type(held[0]).__name__
            raise ValueError(
                f"{own} around {name}, which holds an optimizer itself: it would mix weights of one step's variables "
                f"with those of another's. Write {name}({own}({inside}(…), model), …)."
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle keeps: as in torch, no hooks."""
        return {**super().__getstate__(), "model": self.model, "method": self.method}

    @property
    def detached(self) -> bool:
        """Whether `detach` was called."""
        return type(self.method) is Method

    def _saved_state(self) -> dict[Any, Any]:
        inside = defaultdict(dict, super()._saved_state())
        for parameter, entries in self._remembered(self.method.state()).items():
            inside[parameter] = {**inside[parameter], **entries}
        return inside

    def _remembered(self, state: Mapping[Tensor, Mapping[str, Any]]) -> dict[Tensor, dict[str, Any]]:
        """What a checkpoint has of each parameter beside the state that the optimizer keeps of it.

        Not where that has none yet: a bare optimizer, which may load this, would take it for a state of its own.
        One that keeps none has none after a step either: torch.distributed.checkpoint wants all parameters then.
        """
        kept = self.inner.state
        groups = [[(p, bool(kept.get(p))) for p in group["params"]] for group in self.param_groups]
        bare = [self.method.steps > 0 and not any(has for _, has in group) for group in groups]
        shown = [p for group, alike in zip(groups, bare, strict=True) for p, has in group if has or alike]
        return {p: self._named(state.get(p, {})) for p in shown} if state else {}

    def _named(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        settings = {name: getattr(self.method, name) or 0 for name in self.method.shaping}
        every = {"steps": self.method.steps, **settings, **entries}
        return {self.method.prefix + name: value for name, value in every.items()}

    def _keys(self, state_dict: Mapping[str, Any]) -> Iterator[tuple[Tensor, Any]]:
        """Each parameter, and the key of its part in a state dict: a number, or its name."""
        for own, saved in zip(self.param_groups, state_dict.get("param_groups", ()), strict=False):
            yield from zip(own["params"], saved.get("params", ()), strict=False)

    @torch.compiler.disable  # traced, a step would be dozens of graphs
    @torch.no_grad()
    def _inner_step(self, **kwargs: Any) -> None:
        first, reason = next(self.model.parameters()), ""
        if not self.detached:
            refuse_capture(type(self).__name__, "counts its steps", first)
            reason = self._why_lost(self.model)
        with without_autocast(first.device.type):  # it would round the products of transforms
            try:
                apart = self._mapped_step(**kwargs)
            except NotImplementedError as error:
                self._refuse_meta(error)
                raise
        self.method.after_step()
        inactive = self.method.why_inactive() if self._steps == 2 else ""
        self._tell(reason or apart or inactive, " takes plain steps")

    def _mapped_step(self, **kwargs: Any) -> str:
        """Step, and say why not every layer was treated, or ""."""
        rates: dict[int, tuple[bool, Any]] = {}
        for group in self.param_groups:
            rates |= dict.fromkeys(map(id, group["params"]), (rests(group), group.get("lr")))
        self._note_groups()
        self._kinds = self._kinds or {}
        decay, read, reason = decay_factors(self.inner, self._kinds), hooked(self.inner), ""
        snapshots: list[Snapshot] = []
        for transform in self.method.transforms():
            if any(id(p) not in rates for p in transform.parameters):
                continue  # a model may have several optimizers, and a method know weights of another one's
            found = [rates[id(p)] for p in transform.parameters]
            if len({resting for resting, _ in found}) == 1 or not transform.moves_weights:
                snapshots.append(Snapshot(transform, decay, read, found[0][1]))
            else:
                reason = _ONE_RESTS
        try:
            for snapshot in snapshots:
                snapshot.enter()
            super()._inner_step(**kwargs)
            for snapshot in snapshots:
                snapshot.leave()
            self.method.rescale(snapshots)
            for snapshot in snapshots:
                snapshot.write()
        except BaseException:
            for snapshot in snapshots:
                snapshot.restore()
            raise
        return reason

    def _refuse_meta(self, error: NotImplementedError) -> None:
        if any(p.is_meta for group in self.param_groups for p in group["params"]):
            raise NotImplementedError(
                f"{type(self).__name__} cannot step on meta tensors, which have no numbers to read: give the model "
                "memory by to_empty(device=…) and its weights, and build the optimizer from these."
            ) from error

    def _note_groups(self) -> None:
        """Tell layers which groups have their parameters, if that has changed."""
        groups = [[*map(id, group["params"])] for group in self.param_groups]
        if groups == self._groups:
            return
        self._groups = groups
        place = {parameter: number for number, group in enumerate(groups) for parameter in group}
        for layer in self.method.layers:
            layer.groups = tuple(place.get(id(p)) for p in layer.parameters)

    def settings(self) -> dict[str, Any]:
        return self.method.settings()

    def coverage(self) -> Coverage:
        """Say of every parameter that the optimizer holds how its step is treated, or why it takes the plain one."""
        unknown = (
            "detached" if self.detached else "it, or its name, is newer than the wrapper; wrap the optimizer again"
        )
        return report(self, self.model, self.method.coverage(), self.method.treated_parameters(), unknown)

    def detach(self) -> nn.Module:
        """Return the model, which is the plain one at all times, and take plain steps from now on.

        The inner optimizer keeps its state. What it has gathered so far (momentum, second moments) is of mapped
        gradients, and takes some steps to be forgotten; to begin anew, build another optimizer.
        """
        self.method = Method()
        return self.model

    def metrics(self) -> dict[str, float]:
        """Return what was measured last as flat numbers, for any logger; what is treated is a share in [0, 1]."""
        return self._metrics(self.coverage(), self.method.metrics())

    def _state_dict(self) -> dict[str, Any]:
        plain, state = dict(super()._state_dict()), self.method.state()
        shown, keys = self._remembered(state), dict(self._keys(plain))
        more = {keys[p]: {**plain["state"].get(keys[p], {}), **entries} for p, entries in shown.items()}
        # Of layers that have seen rows, and of weights that have scales.
        seen = {p: entries for p, entries in state.items() if self.method.steps and entries.get("rows", 1)}
        waiting = {keys[p]: self._named(entries) for p, entries in seen.items() if p in keys and p not in shown}
        plain |= {"state": {**plain["state"], **more}} if more else {}
        return plain | ({WAITING: waiting} if waiting else {})

    def _load_state_dict(self, state_dict: dict[str, Any]) -> None:
        name, own = type(self).__name__, self.method.state()
        found: dict[Tensor, dict[str, Any]] = {}
        parameters, prefix = {key: parameter for parameter, key in self._keys(state_dict)}, self.method.prefix
        rest: dict[str, dict[Any, Any]] = {part: dict(state_dict.get(part, {})) for part in ("state", WAITING)}
        for part, key in [(part, key) for part, saved in rest.items() for key in saved]:
            entries = rest[part][key]
            names = [n for n in ours(entries) if n.startswith(prefix)]
            # A flat checkpoint that lacks a name has given an empty dict for it.
            mine = {n: entries[n] for n in names if entries[n] != {}}
            if mine and key in parameters:  # else the optimizer refuses the groups
                wanted, place = self._named(own.get(parameters[key], {})), f"{name}: state_dict[{part!r}][{key!r}]"
                for setting in self.method.shaping:
                    saved, here = mine.get(prefix + setting), wanted[prefix + setting]
                    if isinstance(saved, int) and saved != here:
                        saved_with = f"{setting}={saved or None}, this has {setting}={here or None}"
                        raise ValueError(f"{place} was saved with {saved_with}; {_REMEDY}.")
                check_like(mine, wanted, place, _REMEDY)
                found[parameters[key]] = {n.removeprefix(prefix): value for n, value in mine.items()}
            if names:
                rest[part][key] = {n: value for n, value in entries.items() if n not in names}
                if not rest[part][key]:
                    del rest[part][key]
        super()._load_state_dict({**state_dict, **rest})
        self.method.steps = next((entries["steps"] for entries in found.values()), 0)
        self.method.load_state(found)
        kept = rest["state"]
        if lacking := [p for p, key in self._keys(state_dict) if p in own and p not in found and kept.get(key)]:
            warn(
                f"{name}: the checkpoint has nothing of what it remembers of {len(lacking)} of {len(own)} parameters, "
                "which it measures anew. Save what state_dict() of the wrapper returns, or torch's "
                "get_optimizer_state_dict(model, wrapper), and not that of the optimizer inside."
            )
