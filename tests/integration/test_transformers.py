"""Models of transformers, trained by its Trainer: what a wrapper knows of them, and what it leaves alone."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from adiv_optim import attach, coverage, detach, jacobian
from tests.helpers.cases import relative_error
from tests.helpers.loops import DIFFERENT, EXACT, METHODS, adamw, deviation, each_method, plain_loop, train, weights
from tests.helpers.modules import Model
from tests.integration.test_trainers import TRAINERS, constant

transformers = pytest.importorskip("transformers", minversion="5")

pytestmark = [
    pytest.mark.integration,
    pytest.mark.usefixtures("in_float64"),
    pytest.mark.filterwarnings("ignore:UnitConsistent treats"),  # rightly, of GELU and LayerNorm
]


def awake(build):
    """No parameter starts at zero: a key's bias would stay there, and rounding is not small beside it."""
    torch.manual_seed(0)
    model = build()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn_like(p)
    return model


def bert():
    dropouts = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    config = transformers.BertConfig(vocab_size=11, max_position_embeddings=8, num_labels=3, **sizes, **dropouts)
    return awake(lambda: transformers.BertForSequenceClassification(config))


def gpt2():
    dropouts = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    sizes = {"n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_inner": 12}
    # A cache is an output, and pins the values of the attention.
    config = transformers.GPT2Config(vocab_size=11, pad_token_id=0, num_labels=3, use_cache=False, **sizes, **dropouts)
    return awake(lambda: transformers.GPT2ForSequenceClassification(config))


def sentences():
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randint(1, 11, (8, 6), generator=generator), torch.randint(3, (8,), generator=generator))
        for _ in range(3)
    ]


def with_logits(net):
    """The model as a plain loop calls it."""
    return Model(lambda model, ids: model.net(ids).logits, net=net)


@each_method
@pytest.mark.parametrize("build", [bert, gpt2])
def test_transformers_model_in_its_trainer(build, method, tmp_path):
    model = build()
    optimizer = method.wrap(adamw(model), model, sentences()[0][0])
    TRAINERS["transformers"].train(model, (optimizer, constant(optimizer)), sentences(), tmp_path, argument="input_ids")
    found = plain_loop(method, sentences(), build=lambda: with_logits(build()))
    wanted = {name.removeprefix("net."): value for name, value in found.items()}
    assert deviation(weights(model), wanted) <= EXACT
    bare = with_logits(build())
    train(bare, adamw(bare), sentences())
    assert deviation(weights(bare.net), wanted) > DIFFERENT


@pytest.mark.parametrize("name", ["proportional", "disproportional", "batch-ideal"])
def test_gpt2_is_corrected_in_its_conv1d(name):
    rule, (ids, labels) = METHODS[name].rule, sentences()[0]
    model, bare, oracle = attach(gpt2(), rule), gpt2(), gpt2()
    for each in (model, bare):
        F.cross_entropy(each(ids).logits, labels).backward()
    jacobian.backward(oracle, lambda out, y: F.cross_entropy(out.logits, y), ids, labels, rule)
    report = coverage(model)
    assert {name.split(".")[-2] for name in report.treated} == {"c_attn", "c_proj", "c_fc", "score"}
    for path, p in model.named_parameters():
        assert relative_error(p.grad, oracle.get_parameter(path).grad) <= EXACT
        assert torch.equal(p.grad, bare.get_parameter(path).grad) == (path not in report.treated)


def test_an_attached_gpt2_is_unpickled_where_transformers_has_not_been_imported(tmp_path):
    model, ids = attach(gpt2(), METHODS["proportional"].rule), sentences()[0][0]
    torch.save((model, ids), tmp_path / "model.pt")
    program = (
        "import sys, torch; assert 'transformers' not in sys.modules; torch.set_default_dtype(torch.float64); "
        f"model, ids = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False); "
        "print(type(model.transformer.h[0].mlp.c_fc).__name__, model(ids).logits.sum().item())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    kind, found = done.stdout.split()
    assert kind == "CorrectedTransformersConv1D"
    assert float(found) == model(ids).logits.sum().item()
    detach(model)
    assert type(model.transformer.h[0].mlp.c_fc) is transformers.pytorch_utils.Conv1D
