"""Wrappers returned by configure_optimizers of a LightningModule."""

import pytest
import torch.nn.functional as F
from torch.utils.data import DataLoader

from adiv_optim.diagnostics import divergence
from tests.helpers.cases import relative_error
from tests.helpers.loops import (
    DIFFERENT,
    EXACT,
    METHODS,
    adamw,
    deviation,
    each_method_by_name,
    elsewhere,
    images,
    network,
    plain_loop,
    sgd,
    split,
    train,
    weights,
)
from tests.integration.test_loops import LIMIT, clip_by_hand, in_float32, moved, smooth_loop

lightning = pytest.importorskip("lightning")

pytestmark = [
    pytest.mark.integration,
    pytest.mark.usefixtures("in_float64"),
    pytest.mark.filterwarnings("ignore:The `srun` command is available:UserWarning"),
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers:UserWarning"),
]


class Module(lightning.LightningModule):
    """A network trained by a wrapper."""

    def __init__(self, name, build=network, inner=adamw):
        super().__init__()
        self.net, self.name, self.inner = build(), name, inner

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self):
        x = images(1)[0][0].to(next(self.parameters()))
        return METHODS[self.name].wrap(self.inner(self), self, x)


def fit(module, data, checkpoint=None, **options):
    """Train for one epoch, or as the options say; returns the trainer."""
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options = {"accelerator": "cpu", "max_epochs": 1, **dict.fromkeys(quiet, False), **options}
    trainer = lightning.Trainer(**options)
    # A bare list would be taken for one loader per entry.
    trainer.fit(module, DataLoader(data, batch_size=None), ckpt_path=checkpoint)
    return trainer


@each_method_by_name
def test_lightning_trainer(name):
    module = Module(name)
    fit(module, images())
    wanted = plain_loop(METHODS[name], images())
    assert deviation(weights(module.net), wanted) <= EXACT
    bare = network()
    train(bare, adamw(bare), images())
    assert deviation(weights(bare), wanted) > DIFFERENT


@each_method_by_name
def test_lightning_resumes_from_its_checkpoint(name, tmp_path):
    fit(Module(name), images()).save_checkpoint(tmp_path / "one-epoch.ckpt")
    uninterrupted, resumed = Module(name), Module(name, lambda: elsewhere(network))
    fit(uninterrupted, images(), max_epochs=2)
    fit(resumed, images(), tmp_path / "one-epoch.ckpt", max_epochs=2)
    assert deviation(weights(resumed.net), weights(uninterrupted.net)) == 0


@each_method_by_name
def test_lightning_accumulation_and_clipping(name):
    module = Module(name, inner=sgd)
    micro_batches = [part for batch in images() for part in split(batch, 2)]
    fit(module, micro_batches, accumulate_grad_batches=2, gradient_clip_val=LIMIT)
    wanted = plain_loop(METHODS[name], images(), inner=sgd, parts=2, change=clip_by_hand)
    assert deviation(weights(module.net), wanted) <= 1e-4  # torch divides by the norm plus 1e-6
    assert deviation(plain_loop(METHODS[name], images(), inner=sgd, parts=2), wanted) > DIFFERENT


@each_method_by_name
def test_lightning_bfloat16(name):
    module = Module(name, in_float32, sgd)
    fit(module, [(x.float(), y) for x, y in images()], precision="bf16-mixed")
    assert relative_error(moved(weights(module.net), network()), smooth_loop(METHODS[name])) <= 5e-2


class Measured(Module):
    """Measures its own step in training."""

    def training_step(self, batch, index):
        x, y = batch
        within = self.optimizers(use_pl_optimizer=False)
        self.found = [divergence(self.net, F.cross_entropy, x, y, optimizer=o) for o in (self.optimizers(), within)]
        return super().training_step(batch, index)


def test_divergence_sees_through_lightnings_optimizer():
    module = Measured("whitened")
    fit(module, images(1))
    found, wanted = module.found
    assert found.optimizer == wanted.optimizer == "Whitened(AdamW)"
    assert found.descent == wanted.descent
