"""Wrappers handed to the Trainer of transformers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.loops import (
    DIFFERENT,
    EXACT,
    built,
    deviation,
    each_method,
    elsewhere,
    halving,
    images,
    network,
    plain_loop,
    scheduled,
    sgd,
    train,
    weights,
)
from tests.integration.test_loops import LIMIT, clip_by_hand

transformers = pytest.importorskip("transformers", minversion="5")
pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("in_float64")]


class Classifier(nn.Module):
    """What Trainer asks of a model."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, labels=None):
        logits = self.net(x)
        return {"logits": logits} if labels is None else {"logits": logits, "loss": F.cross_entropy(logits, labels)}


def classifier():
    return Classifier(network())


def fit(model, optimizers, data, folder, argument="x", checkpoint=None, **options):
    """One epoch, in order and without clipping, or what the options say."""
    samples = [{argument: x, "labels": y} for batch in data for x, y in zip(*batch, strict=True)]
    defaults = {
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "save_strategy": "no",
        "num_train_epochs": 1,
        "train_sampling_strategy": "sequential",
        "per_device_train_batch_size": len(data[0][0]),
        "max_grad_norm": 0.0,
    }
    arguments = transformers.TrainingArguments(str(folder), **{**defaults, **options})
    trainer = transformers.Trainer(model, arguments, train_dataset=samples, optimizers=optimizers)
    trainer.train(resume_from_checkpoint=checkpoint)


def constant(optimizer):
    return torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)


@each_method
def test_trainer(method, tmp_path):
    model, optimizer = built(method, classifier)
    fit(model, (optimizer, scheduled(optimizer)), images(), tmp_path)
    wanted = plain_loop(method, images(), inner=halving)
    assert deviation(weights(model.net), wanted) <= EXACT
    bare = network()
    train(bare, halving(bare), images())
    assert deviation(weights(bare), wanted) > DIFFERENT


@each_method
def test_trainer_accumulation_and_clipping(method, tmp_path):
    model, optimizer = built(method, classifier, sgd)
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_grad_norm": LIMIT}
    fit(model, (optimizer, constant(optimizer)), images(), tmp_path, **options)
    wanted = plain_loop(method, images(), inner=sgd, parts=2, change=clip_by_hand)
    assert deviation(weights(model.net), wanted) <= 1e-4  # torch divides by the norm plus 1e-6
    assert deviation(plain_loop(method, images(), inner=sgd, parts=2), wanted) > DIFFERENT


@each_method
def test_trainer_resumes_from_checkpoint(method, tmp_path):
    uninterrupted, optimizer = built(method, classifier)
    fit(uninterrupted, (optimizer, scheduled(optimizer)), images(), tmp_path, save_strategy="steps", save_steps=2)
    resumed, optimizer = built(method, lambda: elsewhere(classifier))
    checkpoint = str(tmp_path / "checkpoint-2")
    fit(resumed, (optimizer, scheduled(optimizer)), images(), tmp_path, checkpoint=checkpoint)
    assert deviation(weights(resumed), weights(uninterrupted)) == 0
