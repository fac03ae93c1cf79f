"""gauge.trace of what models return beside tensors, and of models that others have made of models."""

import pytest
import torch
from torch import Tensor, nn

from adiv_optim import gauge
from tests.helpers.cases import relative_error

pytestmark = pytest.mark.usefixtures("in_float64")


class Cache:
    """What torch.export does not know how to return: an object with tensors, and with itself and a model inside."""

    def __init__(self, hidden: Tensor, model: nn.Module) -> None:
        self.layers, self.itself, self.model = [{"hidden": hidden}], self, model


class Returning(nn.Module):
    """Three layers; what it returns beside the last one's output is up to `beside`."""

    def __init__(self, beside) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 2)
        self.beside = beside

    def forward(self, x: Tensor):
        first = self.first(x).relu()
        return {"logits": self.last(self.second(first).relu()), "beside": self.beside(first, self)}


def test_tensors_of_objects_are_outputs():
    model, x = Returning(Cache), torch.randn(2, 3)
    graph = gauge.trace(model, x)
    assert graph.free == 5
    assert graph.nodes[0].why == ("output of the model, in a Cache",)
    assert graph.nodes[2].why == ("output of the model",)
    before = model(x)["logits"], model(x)["beside"].layers[0]["hidden"]
    gauge.apply_gauge(model, graph, gauge.random_gauge(graph, 1.5))
    after = model(x)["logits"], model(x)["beside"].layers[0]["hidden"]
    assert max(relative_error(*pair) for pair in zip(after, before, strict=True)) <= 1e-10
    assert "forward" not in model.__dict__


@pytest.mark.parametrize("beside", [None, "text", 3, object()], ids=lambda value: type(value).__name__)
def test_what_is_no_tensor_pins_nothing(beside):
    assert gauge.trace(Returning(lambda *_: beside), torch.randn(2, 3)).free == 4 + 5


def test_forward_set_on_the_model_stays():
    model = Returning(lambda *_: None)
    forward = model.forward = lambda x: model.last(model.second(x))
    assert gauge.trace(model, torch.randn(2, 4)).free == 5
    assert model.forward is forward


def relus() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


@pytest.mark.parametrize(
    "made",
    [torch.fx.symbolic_trace, lambda model: torch.export.export(model, (torch.randn(2, 3),)).module()],
    ids=["fx", "exported"],
)
def test_traced_by_others_is_the_model(made):
    model, x = relus(), torch.randn(2, 3)
    wanted, found = gauge.trace(model, x), gauge.trace(made(model), x)
    assert str(found) == str(wanted)
    assert list(found.parameters) == list(wanted.parameters)


@pytest.mark.parametrize(
    "made",
    [
        lambda model: torch.jit.trace(model, torch.randn(2, 3)),
        lambda model: nn.Sequential(torch.jit.trace(model[0], torch.randn(2, 3)), *model[1:]),
    ],
    ids=["model", "layer"],
)
def test_torch_jit_is_refused(made):
    with pytest.raises(ValueError, match=r"made of, whose graph fits .* graph=graph"):
        gauge.trace(made(relus()), torch.randn(2, 3))


@pytest.mark.integration
@pytest.mark.parametrize(
    ("config", "model"), [("GPT2Config", "GPT2LMHeadModel"), ("LlamaConfig", "LlamaForCausalLM")], ids=["gpt2", "llama"]
)
def test_decoders_of_transformers_as_they_are_configured(config, model):
    transformers = pytest.importorskip("transformers", minversion="5")
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 11}
    config = getattr(transformers, config)(**sizes, bos_token_id=0, eos_token_id=0)
    model = getattr(transformers, model)(config).eval()
    tokens = torch.randint(11, (2, 5))
    graph, without = gauge.trace(model, tokens), gauge.trace(model, {"input_ids": tokens, "use_cache": False})
    assert without.free == graph.free + 2 * 8  # the values
    before = model(tokens)
    gauge.apply_gauge(model, graph, gauge.random_gauge(graph, 1.5))
    after = model(tokens)
    for one, other in zip(after.past_key_values, before.past_key_values, strict=True):
        assert all(relative_error(a, b) <= 1e-10 for a, b in zip(one[:2], other[:2], strict=True))
    assert relative_error(after.logits, before.logits) <= 1e-10
