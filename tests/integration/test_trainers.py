"""Wrappers in the trainers of others, Accelerate, Lightning and transformers: the steps are those of the plain loop."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from adiv_optim import ChainedOptimizer
from adiv_optim.diagnostics import divergence
from tests.helpers.cases import relative_error
from tests.helpers.loops import (
    DIFFERENT,
    EXACT,
    METHODS,
    Batch,
    Weights,
    adamw,
    built,
    deviation,
    each_method_by_name,
    elsewhere,
    halving,
    images,
    network,
    plain_loop,
    scheduled,
    sgd,
    split,
    train,
    weights,
)
from tests.integration.test_loops import LIMIT, clip_by_hand, in_float32, moved, skipping, smooth_loop

pytestmark = [
    pytest.mark.integration,
    pytest.mark.usefixtures("in_float64"),
    pytest.mark.filterwarnings("ignore:The `srun` command is available:UserWarning"),
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers:UserWarning"),
]


class Accelerate:
    """A loop of one's own, with what Accelerator.prepare returns."""

    def fit(self, name: str, data: list[Batch], folder: Path, build=network, inner=adamw, **how: Any) -> Weights:
        model, optimizer = built(METHODS[name], build, inner)
        self.loop(*self.prepared(model, optimizer, **how), data, **how)
        return weights(model)

    def accelerator(self, precision: str = "no", parts: int = 1) -> Any:
        accelerate = pytest.importorskip("accelerate")
        # Accelerators of one process share what the first was told, its precision included.
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()
        return accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=parts)

    def prepared(self, model: nn.Module, optimizer: Any, schedule=None, precision="no", parts=1, **_: Any) -> Any:
        accelerator = self.accelerator(precision, parts)
        return accelerator, *accelerator.prepare(model, optimizer, *([schedule(optimizer)] if schedule else []))

    def loop(self, accelerator: Any, model: Any, optimizer: Any, *given: Any, parts=1, limit=0.0, **_: Any) -> None:
        *schedulers, data = given
        samples = [sample for batch in data for sample in zip(*batch, strict=True)]
        loader = accelerator.prepare(DataLoader(samples, len(data[0][0]) // parts))
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                if limit and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), limit)
                optimizer.step()
                for scheduler in schedulers:
                    scheduler.step()
                optimizer.zero_grad()

    def resumed(self, name: str, folder: Path) -> tuple[Weights, Weights]:
        first, optimizer = built(METHODS[name])
        prepared = self.prepared(first, optimizer)
        self.loop(*prepared, images()[:2])
        prepared[0].save_state(folder)
        self.loop(*prepared, images()[2:])
        second, optimizer = built(METHODS[name], elsewhere)
        prepared = self.prepared(second, optimizer)
        prepared[0].load_state(folder)
        self.loop(*prepared, images()[2:])
        return weights(first), weights(second)


class Lightning:
    """A LightningModule, whose configure_optimizers returns the wrapper."""

    def module(self, name: str, build=network, inner=adamw, schedule=None) -> Any:
        lightning = pytest.importorskip("lightning")

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = build()

            def forward(self, x):
                return self.net(x)

            def training_step(self, batch, index):
                x, y = batch
                return F.cross_entropy(self(x), y)

            def configure_optimizers(self):
                x = images(1)[0][0].to(next(self.parameters()))
                optimizer = METHODS[name].wrap(inner(self), self, x)
                each_step = {"scheduler": schedule(optimizer), "interval": "step"} if schedule else None
                return {"optimizer": optimizer, "lr_scheduler": each_step} if schedule else optimizer

        return Module()

    def train(self, module: Any, data: list[Batch], checkpoint: Path | None = None, **options: Any) -> Any:
        quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        options = {"accelerator": "cpu", "max_epochs": 1, **dict.fromkeys(quiet, False), **options}
        trainer = pytest.importorskip("lightning").Trainer(**options)
        # A bare list would be taken for one loader per entry.
        trainer.fit(module, DataLoader(data, batch_size=None), ckpt_path=checkpoint)
        return trainer

    def fit(self, name: str, data: list[Batch], folder: Path, parts=1, limit=None, precision="no", **how) -> Weights:
        module = self.module(name, **how)
        micro_batches = [part for batch in data for part in split(batch, parts)]
        options = {"precision": "bf16-mixed"} if precision == "bf16" else {}
        self.train(module, micro_batches, accumulate_grad_batches=parts, gradient_clip_val=limit, **options)
        return weights(module.net)

    def resumed(self, name: str, folder: Path) -> tuple[Weights, Weights]:
        self.train(self.module(name), images()).save_checkpoint(folder / "one-epoch.ckpt")
        first, second = self.module(name), self.module(name, lambda: elsewhere(network))
        self.train(first, images(), max_epochs=2)
        self.train(second, images(), folder / "one-epoch.ckpt", max_epochs=2)
        return weights(first.net), weights(second.net)


class Classifier(nn.Module):
    """What the Trainer of transformers asks of a model."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x, labels=None):
        logits = self.net(x)
        return {"logits": logits} if labels is None else {"logits": logits, "loss": F.cross_entropy(logits, labels)}


def constant(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)


class Transformers:
    """The Trainer of transformers, given the wrapper and a scheduler."""

    def train(self, model, optimizers, data, folder: Path, argument="x", checkpoint=None, **options: Any) -> None:
        """One epoch, in order and without clipping, or what the options say."""
        transformers = pytest.importorskip("transformers", minversion="5")
        samples = [{argument: x, "labels": y} for batch in data for x, y in zip(*batch, strict=True)]
        defaults = {
            "use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no",
            "num_train_epochs": 1, "train_sampling_strategy": "sequential", "max_grad_norm": 0.0,
            "per_device_train_batch_size": len(data[0][0]),
        }  # fmt: skip
        arguments = transformers.TrainingArguments(str(folder), **{**defaults, **options})
        given = {"optimizers" if isinstance(optimizers[0], Optimizer) else "optimizer_cls_and_kwargs": optimizers}
        trainer = transformers.Trainer(model, arguments, train_dataset=samples, **given)
        trainer.train(resume_from_checkpoint=checkpoint)

    def fit(self, name, data, folder: Path, build=network, inner=adamw, schedule=constant, parts=1, limit=0.0):
        model, optimizer = built(METHODS[name], lambda: Classifier(build()), inner)
        size = len(data[0][0]) // parts
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": parts, "max_grad_norm": limit}
        self.train(model, (optimizer, schedule(optimizer)), data, folder, **options)
        return weights(model.net)

    def resumed(self, name: str, folder: Path) -> tuple[Weights, Weights]:
        first, optimizer = built(METHODS[name], lambda: Classifier(network()))
        saving = {"save_strategy": "steps", "save_steps": 2}
        self.train(first, (optimizer, scheduled(optimizer)), images(), folder, **saving)
        second, optimizer = built(METHODS[name], lambda: elsewhere(lambda: Classifier(network())))
        checkpoint = str(folder / "checkpoint-2")
        self.train(second, (optimizer, scheduled(optimizer)), images(), folder, checkpoint=checkpoint)
        return weights(first), weights(second)


TRAINERS: dict[str, Any] = {"accelerate": Accelerate(), "lightning": Lightning(), "transformers": Transformers()}
each_trainer = pytest.mark.parametrize("trainer", TRAINERS.values(), ids=TRAINERS)


@each_method_by_name
@each_trainer
def test_trained_with_a_schedule(trainer, name, tmp_path):
    wanted = plain_loop(METHODS[name], images(), inner=halving)
    assert deviation(trainer.fit(name, images(), tmp_path, schedule=scheduled), wanted) <= EXACT
    bare = network()
    train(bare, halving(bare), images())
    assert deviation(weights(bare), wanted) > DIFFERENT


def muon_and_adamw(model: nn.Module) -> Optimizer:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    return ChainedOptimizer([torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-2, eps=1e-3)])


@pytest.mark.parametrize("name", ["whitened", "input-scaled"])
@each_trainer
def test_muon_for_matrices_and_adamw_for_the_rest(trainer, name, tmp_path):
    wanted = plain_loop(METHODS[name], images(), inner=muon_and_adamw)
    assert deviation(trainer.fit(name, images(), tmp_path, inner=muon_and_adamw), wanted) <= EXACT
    assert deviation(plain_loop(METHODS[name], images()), wanted) > DIFFERENT


@each_method_by_name
def test_transformers_calls_a_factory_with_the_model(name, tmp_path):
    def build(model: nn.Module, lr: float) -> Optimizer:
        inner = torch.optim.AdamW(model.parameters(), lr=lr, eps=1e-3)
        return METHODS[name].wrap(inner, model, images(1)[0][0])

    model = Classifier(network())
    options = {"lr_scheduler_type": "constant"}
    TRAINERS["transformers"].train(model, (lambda: build, {"lr": 1e-2}), images(), tmp_path, **options)
    assert deviation(weights(model.net), plain_loop(METHODS[name], images())) <= EXACT


@each_method_by_name
@each_trainer
def test_accumulation_and_clipping(trainer, name, tmp_path):
    found = trainer.fit(name, images(), tmp_path, inner=sgd, parts=2, limit=LIMIT)
    wanted = plain_loop(METHODS[name], images(), inner=sgd, parts=2, change=clip_by_hand)
    assert deviation(found, wanted) <= 1e-4  # torch divides by the norm plus 1e-6
    assert deviation(plain_loop(METHODS[name], images(), inner=sgd, parts=2), wanted) > DIFFERENT


@each_method_by_name
@pytest.mark.parametrize("trainer", ["accelerate", "lightning"])
def test_bfloat16(trainer, name, tmp_path):
    data = [(x.float(), y) for x, y in images()]
    found = TRAINERS[trainer].fit(name, data, tmp_path, build=in_float32, inner=sgd, precision="bf16")
    assert relative_error(moved(found, network()), smooth_loop(METHODS[name])) <= 5e-2


@each_method_by_name
@each_trainer
def test_resumed(trainer, name, tmp_path):
    uninterrupted, resumed = trainer.resumed(name, tmp_path)
    assert deviation(resumed, uninterrupted) == 0


@each_method_by_name
def test_accelerate_float16_skips_a_step(name):
    """With the GradScaler that Accelerate itself makes on a GPU alone."""
    model, optimizer = built(METHODS[name], in_float32, sgd)
    accelerator = TRAINERS["accelerate"].accelerator()
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    model, optimizer = accelerator.prepare(model, optimizer)
    skipped = []

    def step(loss: Tensor) -> None:
        accelerator.backward(loss)
        optimizer.step()
        skipped.append(optimizer.step_was_skipped)

    skipping(model, optimizer, step)
    assert skipped == [False, False, True, False, False]
    assert relative_error(moved(weights(model), network()), smooth_loop(METHODS[name])) <= 1e-2


def test_divergence_refuses_the_optimizer_of_a_trainer():
    """Accelerate's own, in the first of two micro-batches, would take no step."""
    model, ((x, y), *_) = network(), images()
    accelerator, replica, wrapped = TRAINERS["accelerate"].prepared(model, sgd(model), parts=2)
    with accelerator.accumulate(replica):
        with pytest.raises(TypeError, match=r"of type AcceleratedOptimizer; pass .*optimizer\.optimizer of Lightning"):
            divergence(model, F.cross_entropy, x, y, optimizer=wrapped)
        assert divergence(model, F.cross_entropy, x, y, optimizer=wrapped.optimizer).descent > 0
