"""The entries of wrappers in state dicts, beside the state of the optimizer inside."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from .._checks import check_like, warn
from .watching import Watching
from .wrapper import OURS, WITHOUT_STATE, parameters_and_keys, wrapper_entries

#: Settings, whole numbers or None, that the shapes of entries follow from.
_SHAPING = ("max_dim", "rank")
#: The remedy for a checkpoint that does not fit.
_REMEDY = (
    "load what was saved of the same model with the same settings, or leave the names out that begin with "
    f"{OURS!r} to measure anew"
)


class SavedEntries(NamedTuple):
    """The entries of a wrapper in a state dict, beside the state of the optimizer inside.

    Args:
        name: opens the messages of errors.
        watch: remembers them.
        inner: the optimizer inside.
    """

    name: str
    watch: Watching
    inner: Optimizer

    @property
    def settings(self) -> dict[str, int]:
        """The settings that shapes follow from, and 0 for those that are None."""
        return {name: self.watch.settings[name] or 0 for name in _SHAPING if name in self.watch.settings}

    def named(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Return all entries of a parameter, by their names in a state dict."""
        every = {"steps": self.watch.steps, **self.settings, **entries}
        return {self.watch.prefix + name: value for name, value in every.items()}

    def add_to(self, plain: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state dict of the optimizer inside with the entries in it.

        They stand beside the state that it keeps of a parameter, and apart where it keeps none: a bare optimizer, which
        may load this, would take them for a state of its own. If it keeps none of any parameter after a step, they
        stand in their places all the same, since torch.distributed.checkpoint wants all parameters then.
        """
        remembered, state, waiting = self.watch.remembered(), {**plain["state"]}, dict[Any, Any]()
        every = dict(parameters_and_keys(self.inner, plain)) if remembered else {}
        with_state = [p for p in every if self.inner.state.get(p)]
        for parameter in with_state if with_state or not self.watch.steps else [*every]:
            key = every.pop(parameter)
            state[key] = {**state.get(key, {}), **self.named(remembered.get(parameter, {}))}
        for parameter, key in every.items() if self.watch.steps else ():
            # Of layers that have seen rows, and of weights that have scales.
            if (entries := remembered.get(parameter)) and entries.get("rows", 1):
                waiting[key] = self.named(entries)
        return {**plain, "state": state} | ({WITHOUT_STATE: waiting} if waiting else {})

    def split_from(self, state_dict: Mapping[str, Any]) -> tuple[dict[Tensor, dict[str, Any]], dict[str, Any]]:
        """Return the entries in a state dict by parameter, and the state dict without them; changes nothing.

        Raises:
            ValueError: entries of other settings, or damaged.
        """
        remembered, loaded = self.watch.remembered(), dict[Tensor, dict[str, Any]]()
        parameters = {key: parameter for parameter, key in parameters_and_keys(self.inner, state_dict)}
        rest: dict[str, dict[Any, Any]] = {"state": {}, WITHOUT_STATE: {}}
        for part, others in rest.items():
            for key, entries in state_dict.get(part, {}).items():
                names = [n for n in wrapper_entries(entries) if n.startswith(self.watch.prefix)]
                # A flat checkpoint that lacks a name has given an empty dict for it.
                saved = {n: entries[n] for n in names if entries[n] != {}}
                if saved and key in parameters:  # else the optimizer refuses the groups
                    wanted = self.named(remembered.get(parameters[key], {}))
                    self._check(saved, wanted, f"{self.name}: state_dict[{part!r}][{key!r}]")
                    loaded[parameters[key]] = {n.removeprefix(self.watch.prefix): value for n, value in saved.items()}
                left = {n: value for n, value in entries.items() if n not in names} if names else entries
                if left or not names:
                    others[key] = left
        return loaded, {**state_dict, **rest}

    def _check(self, saved: Mapping[str, Any], wanted: Mapping[str, Any], place: str) -> None:
        for setting, here in self.settings.items():
            value = saved.get(self.watch.prefix + setting)
            if isinstance(value, int) and value != here:
                saved_with = f"{setting}={value or None}, this has {setting}={here or None}"
                raise ValueError(f"{place} was saved with {saved_with}; {_REMEDY}.")
        check_like(saved, wanted, place, _REMEDY)

    def load(self, loaded: Mapping[Tensor, Mapping[str, Any]], rest: Mapping[str, Any]) -> None:
        """Let the watch take the entries that `split_from` returned, and warn where a trained parameter has none."""
        remembered, kept = self.watch.remembered(), rest["state"]  # before it takes less
        self.watch.steps = next((entries["steps"] for entries in loaded.values()), 0)
        self.watch.load(loaded)
        keys = parameters_and_keys(self.inner, rest)
        lacking = [p for p, key in keys if p in remembered and p not in loaded and kept.get(key)]
        if lacking:
            warn(
                f"{self.name}: the checkpoint has nothing of what it remembers of {len(lacking)} of "
                f"{len(remembered)} parameters, which it measures anew. Save what state_dict() of the wrapper returns, "
                "or torch's get_optimizer_state_dict(model, wrapper), and not that of the optimizer inside."
            )
