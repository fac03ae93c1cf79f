"""Models of other packages, randomly initialised and small, trained for twenty steps at the wrappers' defaults.

The loss stays finite and falls; nothing is raised, and nothing that a wrapper treats is left out without a word.
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


def timm(name: str, **options: Any) -> tuple[nn.Module, Tensor, Tensor]:
    size = options.get("img_size", 32)
    model = pytest.importorskip("timm").create_model(name, num_classes=10, **options)
    return model, torch.randn(8, 3, size, size), torch.arange(8)


def mixer() -> tuple[nn.Module, Tensor, Tensor]:
    build = pytest.importorskip("timm").models.MlpMixer
    model = build(num_classes=10, img_size=32, patch_size=8, num_blocks=2, embed_dim=32)
    return model, torch.randn(8, 3, 32, 32), torch.arange(8)


SMALL = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def language(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    transformers = pytest.importorskip("transformers")
    small = {**SMALL, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    x = torch.randint(3, 50, (4, 16))
    if name == "gpt2":
        config = transformers.GPT2Config(**SMALL, n_embd=32, n_layer=2, n_head=2, n_positions=16)
        return transformers.GPT2LMHeadModel(config), x, x
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**small)), x, x
    if name == "bert":
        config = transformers.BertConfig(**small, num_labels=3)
        return transformers.BertForSequenceClassification(config), x, torch.tensor([0, 1, 2, 0])
    if name == "vit":
        config = transformers.ViTConfig(**{**small, "image_size": 32, "patch_size": 8, "num_labels": 10})
        return transformers.ViTForImageClassification(config), torch.randn(8, 3, 32, 32), torch.arange(8)
    config = transformers.T5Config(
        **SMALL, decoder_start_token_id=0, d_model=32, d_ff=64, num_layers=2, num_heads=2, d_kv=16
    )
    return transformers.T5ForConditionalGeneration(config), x, x


Build = Callable[[], tuple[nn.Module, Tensor, Tensor]]
MODELS: dict[str, Build] = {
    "resnet18-narrow": lambda: timm("resnet18", channels=(8, 8, 16, 16), stem_width=8),
    "convnext-narrow": lambda: timm("convnext_atto", dims=(8, 8, 16, 16)),
    "vit_tiny": lambda: timm("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2),
    "mixer": mixer,
    **{name: lambda name=name: language(name) for name in ("gpt2", "bert", "t5", "llama", "vit")},
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
