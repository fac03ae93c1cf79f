"""The averages of layers' inputs, as torch.distributed.checkpoint saves and loads them."""

from typing import Any

from .checkpoint import ANYTHING, COUNT, NUMBER, check
from .input_chart import InputChart


class Averages:
    """The averages of a chart by the names of the weights, with the same keys and shapes before and after training.

    A `Stateful` of torch.distributed.checkpoint: every process holds all of it, whatever their number.

    Args:
        chart: whose averages they are.
    """

    def __init__(self, chart: InputChart[Any, Any]) -> None:
        self.chart = chart

    def state_dict(self) -> dict[str, Any]:
        """Return them, with zeros where nothing has been seen: loading writes into tensors that are there."""
        return {"steps": self.chart.steps, "layers": {layer.name: layer.filled() for layer in self.chart.layers}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them; an optimizer's state that is loaded before the next step, and has none, leaves them as they are.

        Raises:
            ValueError: they are of other layers.
        """
        part = {"rows": NUMBER, "total": ANYTHING, ...: ANYTHING}
        wanted = {"steps": COUNT, "layers": {layer.name: part for layer in self.chart.layers}}
        check(state, wanted, "averages", self.chart.remedy)
        layers = {layer.name: layer.emptied(state["layers"][layer.name]) for layer in self.chart.layers}
        state = {**state, "layers": layers}
        self.chart.check_state_dict(state)
        self.chart.load_state_dict(state)
        self.chart.loaded = True
