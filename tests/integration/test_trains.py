"""Models of other packages, randomly initialised and small, trained for twenty steps at the wrappers' defaults.

The loss stays finite and falls; nothing is raised, and nothing that a wrapper treats is left out without a word.
ResNet, ViT, BERT and GPT-2 are held against the plain loop in test_timm and test_transformers.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adiv_optim import BatchIdeal, GradientOnly, Whitened

pytestmark = pytest.mark.integration
STEPS = 20


def convnext() -> tuple[nn.Module, Tensor, Tensor]:
    model = pytest.importorskip("timm").create_model("convnext_atto", num_classes=10, dims=(8, 8, 16, 16))
    return model, torch.randn(8, 3, 32, 32), torch.arange(8)


def mixer() -> tuple[nn.Module, Tensor, Tensor]:
    build = pytest.importorskip("timm").models.MlpMixer
    model = build(num_classes=10, img_size=32, patch_size=8, num_blocks=2, embed_dim=32)
    return model, torch.randn(8, 3, 32, 32), torch.arange(8)


SMALL = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def language(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    transformers = pytest.importorskip("transformers")
    small = {**SMALL, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    x = torch.randint(3, 50, (4, 16))
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**small)), x, x
    if name == "vit":
        config = transformers.ViTConfig(**{**small, "image_size": 32, "patch_size": 8, "num_labels": 10})
        return transformers.ViTForImageClassification(config), torch.randn(8, 3, 32, 32), torch.arange(8)
    config = transformers.T5Config(
        **SMALL, decoder_start_token_id=0, d_model=32, d_ff=64, num_layers=2, num_heads=2, d_kv=16
    )
    return transformers.T5ForConditionalGeneration(config), x, x


Build = Callable[[], tuple[nn.Module, Tensor, Tensor]]
MODELS: dict[str, Build] = {
    "convnext-narrow": convnext,
    "mixer": mixer,
    **{name: lambda name=name: language(name) for name in ("t5", "llama", "vit")},
}
each_model = pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    if type(model).__module__.startswith("transformers"):
        return model(x, labels=y).loss
    return F.cross_entropy(model(x), y)


def losses(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> list[float]:
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@each_model
@pytest.mark.parametrize("wrapper", ["whitened", "batch-ideal"])
def test_twenty_steps_at_defaults_lower_the_loss(wrapper, build):
    torch.manual_seed(0)
    model, x, y = build()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*less than half", category=UserWarning)
        warnings.filterwarnings("ignore", message="the correction reaches", category=UserWarning)
        if wrapper == "whitened":
            optimizer = Whitened(torch.optim.AdamW(model.parameters(), lr=1e-3), model)
        else:
            optimizer = GradientOnly(torch.optim.SGD(model.parameters(), lr=0.1), model, BatchIdeal())
    found = losses(model, optimizer, x, y)
    assert all(loss < float("inf") for loss in found)
    assert sum(found[-3:]) < sum(found[:3])
    assert optimizer.coverage().treated
    assert not [name for name, value in optimizer.metrics().items() if "failed" in name and value]
