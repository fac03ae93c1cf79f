"""gauge.trace of outputs that are no tensors, and of models that others have made of models."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from adiv_optim import gauge
from tests.helpers.cases import relative_error
from tests.helpers.modules import Model

pytestmark = pytest.mark.usefixtures("in_float64")


@pytest.mark.parametrize(
    "remake",
    [torch.fx.symbolic_trace, lambda model: torch.export.export(model, (torch.randn(2, 3),)).module()],
    ids=["fx", "exported"],
)
def test_traced_by_others_is_the_model(remake):
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(2, 3)
    wanted, remade = gauge.trace(model, x), gauge.trace(remake(model), x)
    assert str(remade) == str(wanted)
    assert list(remade.parameters) == list(wanted.parameters)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("config", "model"), [("GPT2Config", "GPT2LMHeadModel"), ("LlamaConfig", "LlamaForCausalLM")], ids=["gpt2", "llama"]
)
def test_decoders_of_transformers_without_their_cache(config, model):
    transformers = pytest.importorskip("transformers", minversion="5")
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 11}
    config = getattr(transformers, config)(**sizes, bos_token_id=0, eos_token_id=0)
    model = getattr(transformers, model)(config).eval()
    tokens = torch.randint(11, (2, 5))
    graph, before = gauge.trace(model, {"input_ids": tokens, "use_cache": False}), model(tokens)
    gauge.apply_gauge(model, graph, gauge.random_gauge(graph, 1.5))
    assert graph.free >= 2 * 8  # the values
    assert relative_error(model(tokens).logits, before.logits) <= 1e-10


def test_outputs_that_torch_export_does_not_know_are_refused():
    model = Model(lambda model, x: SimpleNamespace(hidden=model.layer(x)), layer=nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"return tensors alone \(of transformers with use_cache=False\)"):
        gauge.trace(model, torch.randn(2, 3))
