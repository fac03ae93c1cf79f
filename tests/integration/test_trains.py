"""Models of other packages, randomly initialised and small, trained for twenty steps at the wrappers' defaults.

The loss stays finite and falls; nothing is raised, and nothing that a wrapper treats is left out without a word.
ResNet, ViT, BERT and GPT-2 are held against the plain loop in test_timm and test_transformers.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adiv_optim import BatchIdeal, GradientOnly, Whitened

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:.*less than half:UserWarning", "ignore:the correction reaches:UserWarning"),
]


def convnext() -> tuple[nn.Module, Tensor, Tensor]:
    model = pytest.importorskip("timm").create_model("convnext_atto", num_classes=10, dims=(8, 8, 16, 16))
    return model, torch.randn(8, 3, 32, 32), torch.arange(8)


SMALL = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def llama() -> tuple[nn.Module, Tensor, Tensor]:
    transformers, x = pytest.importorskip("transformers"), torch.randint(3, 50, (4, 16))
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **sizes)), x, x


def t5() -> tuple[nn.Module, Tensor, Tensor]:
    transformers, x = pytest.importorskip("transformers"), torch.randint(3, 50, (4, 16))
    sizes = {"decoder_start_token_id": 0, "d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "d_kv": 16}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**SMALL, **sizes)), x, x


@pytest.mark.parametrize("build", [convnext, llama, t5])
@pytest.mark.parametrize("wrapper", ["whitened", "batch-ideal"])
def test_twenty_steps_at_defaults_lower_the_loss(wrapper, build):
    torch.manual_seed(0)
    model, x, y = build()
    if wrapper == "whitened":
        optimizer = Whitened(torch.optim.AdamW(model.parameters(), lr=1e-3), model)
    else:
        optimizer = GradientOnly(torch.optim.SGD(model.parameters(), lr=0.1), model, BatchIdeal())
    found = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) if build is convnext else model(x, labels=y).loss
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    assert all(loss < float("inf") for loss in found)
    assert sum(found[-3:]) < sum(found[:3])
    assert optimizer.coverage().treated
    assert not [name for name, value in optimizer.metrics().items() if "failed" in name and value]
