"""The recipe from a model with normalisers to one without: GPT-2 of transformers, and a ViT of timm."""

import pytest
import torch
from torch import Tensor, nn

from adiv_optim import InputScaled
from adiv_optim.layers import convert

pytestmark = pytest.mark.integration


def without_norms(model: nn.Module) -> nn.Module:
    kinds = {type(module) for module in model.modules() if isinstance(module, nn.LayerNorm)}
    return convert(model, {kind: lambda old: nn.Identity() for kind in kinds})


def residual_rms(model: nn.Module, block: nn.Module, inputs: Tensor) -> Tensor:
    seen: list[Tensor] = []
    handle = block.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        model(inputs)
    handle.remove()
    return seen[0].square().mean().sqrt()


def gpt2() -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    transformers = pytest.importorskip("transformers", minversion="5")
    sizes = {"vocab_size": 11, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 0}
    config = transformers.GPT2Config(**sizes, eos_token_id=0, tie_word_embeddings=False)
    model = without_norms(transformers.GPT2LMHeadModel(config))
    for embedding in (model.transformer.wte, model.transformer.wpe):
        nn.init.normal_(embedding.weight, std=1.0)
    tokens = torch.arange(64).square().view(4, 16) % 11
    return model, model.transformer.h[0], tokens, tokens.roll(-1, 1)


def vit() -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    timm = pytest.importorskip("timm")
    sizes = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 48, "num_heads": 3, "num_classes": 10}
    model = without_norms(timm.create_model("vit_tiny_patch16_224", **sizes))
    images = torch.rand(8, 3, 32, 32)
    with torch.no_grad():
        size = residual_rms(model, model.blocks[0], images)
        for part in (model.patch_embed.proj.weight, model.patch_embed.proj.bias, model.pos_embed, model.cls_token):
            part.div_(size)
    return model, model.blocks[0], images, torch.arange(8)


@pytest.mark.parametrize("build", [gpt2, vit])
def test_recipe_starts_at_one_and_trains(build):
    torch.manual_seed(0)
    model, block, inputs, targets = build()
    assert not any(isinstance(module, nn.LayerNorm) for module in model.modules())
    assert residual_rms(model, block, inputs) == pytest.approx(2**0.5 if build is gpt2 else 1.0, rel=0.2)
    optimizer = InputScaled(torch.optim.AdamW(model.parameters(), lr=3e-3), model, hold=True)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        found = model(inputs)
        found = getattr(found, "logits", found)
        loss = nn.functional.cross_entropy(found.flatten(0, -2), targets.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]
    assert not optimizer.coverage().never_seen
    reading = [how for name, how in optimizer.coverage().treated.items() if "qkv" in name or "c_attn" in name]
    assert len(reading) == 2
    assert not any("divided by 1," in how for how in reading)
