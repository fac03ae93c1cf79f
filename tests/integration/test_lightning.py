"""Wrappers returned by configure_optimizers of a LightningModule."""

import pytest
import torch
import torch.nn.functional as F

from tests.cases import relative_error
from tests.integration.methods import EXACT, METHODS, adamw, deviation, each_method_by_name, images, plain_loop, split
from tests.integration.methods import weights as weights_of
from tests.integration.test_loops import LIMIT, clip_by_hand, moved, nearly_smooth, sgd

lightning = pytest.importorskip("lightning")

pytestmark = [
    pytest.mark.usefixtures("in_float64"),
    pytest.mark.filterwarnings("ignore:The `srun` command is available:UserWarning"),
]


class Module(lightning.LightningModule):
    """A network trained by a wrapper."""

    def __init__(self, name: str, build=nearly_smooth, inner=adamw) -> None:
        super().__init__()
        self.net, self.name, self.inner = build(), name, inner

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        x = images(1)[0][0].to(next(self.parameters()))
        return METHODS[self.name].wrap(self.inner(self.net), self.net, x)


def trainer(**options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return lightning.Trainer(accelerator="cpu", enable_model_summary=False, **quiet, **{"max_epochs": 1, **options})


@each_method_by_name
def test_lightning_trainer(name, tmp_path):
    """One epoch, a checkpoint, and another epoch from it in a new module."""
    module = Module(name)
    first = trainer()
    first.fit(module, images())
    wanted = plain_loop(METHODS[name], images(), build=nearly_smooth)
    assert deviation(weights_of(module.net), wanted) <= EXACT
    first.save_checkpoint(tmp_path / "epoch.ckpt")
    again = Module(name)
    trainer(max_epochs=2).fit(again, images(), ckpt_path=tmp_path / "epoch.ckpt")
    twice = Module(name)
    trainer(max_epochs=2).fit(twice, images())
    assert deviation(weights_of(again.net), weights_of(twice.net)) == 0


@each_method_by_name
def test_lightning_accumulation_and_clipping(name):
    module = Module(name, inner=sgd)
    micro = [part for batch in images() for part in split(batch, 2)]
    trainer(accumulate_grad_batches=2, gradient_clip_val=LIMIT).fit(module, micro)
    wanted = plain_loop(METHODS[name], images(), build=nearly_smooth, inner=sgd, parts=2, change=clip_by_hand)
    assert deviation(weights_of(module.net), wanted) <= 1e-4  # torch divides by the norm plus 1e-6


@each_method_by_name
def test_lightning_bfloat16(name):
    module = Module(name, build=lambda: nearly_smooth().float(), inner=sgd)
    trainer(precision="bf16-mixed").fit(module, [(x.float(), y) for x, y in images()])
    wanted = moved(plain_loop(METHODS[name], images(), build=nearly_smooth, inner=sgd), nearly_smooth())
    assert relative_error(moved(weights_of(module.net), nearly_smooth()), wanted) <= 5e-2
