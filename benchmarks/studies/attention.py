"""Attention logits: how far from ideal their updates are, what the ideal step costs, and what it trains."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from operator import itemgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import jvp, vjp

from adiv_optim import Proportional, functional
from adiv_optim.attention import AttentionIdeal, SelfAttention, alignment, effective_logit_update, ideal_logit_step

from ..core.run import step
from ..core.study import Recipe, measurement
from ..core.table import Cell, Row, Section, Table, estimate, exact, grouped, mean_and_error
from ..data import Dataset, load
from ..speed.timing import device, interleaved, ratio

#: What is priced and trained, by the arguments of `SelfAttention`; the rules stop early, as a training run would.
METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "QK-norm": {"qk_norm": True},
    "ideal, joint": {"correction": AttentionIdeal(damping=0.1, tolerance=1e-2, max_iterations=30)},
    "ideal, each sequence": {"correction": AttentionIdeal(damping=0.1, joint=False, tolerance=1e-2, max_iterations=30)},
}
#: A control: query and key projections stay as they were drawn.
FROZEN = "none, query and key frozen"
#: (sequences, tokens, features, heads)
SHAPES = ((1, 16, 64, 4), (16, 16, 64, 4), (4, 64, 128, 4))
#: Learning rates, and factors on that of the query and key projections: the ideal step comes in other units.
Grids = Mapping[str, tuple[Sequence[float], Sequence[float]]]
GRIDS: Grids = {
    "adam": ((3e-3, 1e-2, 3e-2), (0.1, 0.3, 1.0, 3.0, 10.0)),
    "sgd": ((0.1, 0.3, 1.0), (1.0, 10.0, 100.0, 1e3, 1e4)),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}
BATCH, SEARCH_SEED = 32, 1000
#: The loss of a training that broke down: JSON has no infinity.
BROKEN = 1e9


def compare(
    rounds: int = 30, draws: int = 20, epochs: int = 10, seeds: int = 3,
    shapes: Sequence[tuple[int, int, int, int]] = SHAPES, grids: Grids = GRIDS,
) -> dict[str, Any]:  # fmt: skip
    """Measure everything: `draws` of weights, inputs and g for the alignment, `rounds` of timing for each shape."""
    return {
        "alignment": [_alignment(sequences, uneven, draws) for sequences in (1, 16) for uneven in (False, True)],
        "price": [_price(shape, rounds) for shape in shapes],
        "training": _training(epochs, seeds, grids),
        "rules": {name: repr(options["correction"]) for name, options in METHODS.items() if "correction" in options},
    }


def _alignment(sequences: int, uneven: bool, draws: int) -> dict[str, Any]:
    """The first-order change of the logits against the ideal one, at the start of training."""
    tokens, dim, heads = 16, 64, 4
    found: dict[str, list[tuple[float, float]]] = {}
    for seed in range(draws):
        torch.manual_seed(seed)
        layer = SelfAttention(dim, heads)
        sides = {"q": layer.q_proj, "k": layer.k_proj}
        parameters = {f"{s}_{name}": p.detach() for s, side in sides.items() for name, p in side.named_parameters()}
        x = torch.randn(sequences, tokens, dim)
        if uneven:
            x = x * torch.randn(sequences, tokens, 1).exp()
        g = torch.randn(sequences, heads, tokens, tokens)
        for name, change in _changes(x, parameters, g, heads).items():
            pair = alignment(change, g)
            found.setdefault(name, []).append((pair.cosine.mean().item(), pair.gain.mean().item()))
    about = {"sequences": sequences, "tokens": tokens, "features": dim, "heads": heads, "uneven_norms": uneven}
    rows = []
    for name, pairs in found.items():
        cosines, gains = zip(*pairs, strict=True)
        cosine, error = mean_and_error(cosines)
        rows.append({"method": name, "cosine": cosine, "cosine_error": error, "gain": statistics.median(gains)})
    return {**about, "draws": draws, "rows": rows}


def _changes(x: Tensor, parameters: dict[str, Any], g: Tensor, heads: int) -> dict[str, Tensor]:
    common = {"grad_logits": g, **parameters, "num_heads": heads}
    effective = partial(effective_logit_update, x, **common)
    found = {
        "none": effective(),
        "Proportional": effective(gradients=_row_gradients(x, parameters, g, heads)),
        "QK-norm": _normed_change(x, parameters, g, heads),
    }
    for (name, joint), damping in product((("ideal, joint", True), ("ideal, each sequence", False)), (1e-3, 0.1)):
        # The tolerance is for the mean of many cosines: more digits would cost time and change none that is shown.
        rule = AttentionIdeal(damping, joint, tolerance=1e-4, max_iterations=500)
        gradients = ideal_logit_step(x, **common, rule=rule).gradients
        found[f"{name} (damping {damping:g})"] = effective(gradients=gradients)
    return found


def _products(queries: Tensor, keys: Tensor, heads: int, normed: bool = False) -> Tensor:
    split = [t.unflatten(-1, (heads, -1)).transpose(-3, -2) for t in (queries, keys)]
    if normed:
        split = [t / t.square().mean(-1, keepdim=True).sqrt() for t in split]
    return split[0] @ split[1].mT / split[0].shape[-1] ** 0.5


def _row_gradients(x: Tensor, parameters: dict[str, Tensor], g: Tensor, heads: int) -> dict[str, Tensor]:
    leaves = {name: p.clone().requires_grad_() for name, p in parameters.items()}
    q, k = (functional.linear(x, leaves[f"{s}_weight"], leaves[f"{s}_bias"], Proportional()) for s in "qk")
    _products(q, k, heads).backward(g)
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def _normed_change(x: Tensor, parameters: dict[str, Tensor], g: Tensor, heads: int) -> Tensor:
    def normed(p: dict[str, Tensor]) -> Tensor:
        queries, keys = (F.linear(x, p[f"{side}_weight"], p[f"{side}_bias"]) for side in "qk")
        return _products(queries, keys, heads, normed=True)

    gradients = vjp(normed, parameters)[1](g)[0]
    change: Tensor = jvp(normed, (parameters,), (gradients,))[1]
    return -change


def _price(shape: tuple[int, int, int, int], rounds: int) -> dict[str, Any]:
    """Forward and backward of the whole module."""
    sequences, tokens, dim, heads = shape
    torch.manual_seed(0)
    x = torch.randn(sequences, tokens, dim, device=device(), requires_grad=True)
    g = torch.randn_like(x)
    layers = {name: SelfAttention(dim, heads, **options).to(device()) for name, options in METHODS.items()}

    def run(layer: nn.Module) -> None:
        layer.zero_grad()
        x.grad = None
        layer(x).backward(g)

    seconds = interleaved({name: partial(run, layer) for name, layer in layers.items()}, rounds)
    plain = seconds.pop("none")
    rows = [{"method": name, "time_ratio": ratio(spent, plain)} for name, spent in seconds.items()]
    return {"shape": list(shape), "plain_ms": 1e3 * statistics.median(plain), "rows": rows}


class RowClassifier(nn.Module):
    """Digits as eight tokens, their rows: embed, attend once with a residual, pool by the mean, classify."""

    def __init__(self, classes: int, dim: int = 32, heads: int = 4, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Linear(8, dim)
        self.position = nn.Parameter(0.5 * torch.randn(8, dim))
        self.attention = SelfAttention(dim, heads, **options)
        self.head = nn.Linear(dim, classes)

    def forward(self, pixels: Tensor) -> Tensor:
        """(samples, 64) → (samples, classes)."""
        tokens = self.embed(pixels.unflatten(1, (8, 8))) + self.position
        return self.head((tokens + self.attention(tokens)).mean(1))


def _train(
    method: str, optimizer: str, lr: float, factor: float, seed: int, epochs: int, split: Dataset
) -> tuple[float, float]:
    """Train once; return test accuracy in % and test loss."""
    torch.manual_seed(seed)
    model = RowClassifier(split.classes, **METHODS.get(method, {})).to(device())
    own = [*model.attention.q_proj.parameters(), *model.attention.k_proj.parameters()]
    for parameter in own:
        parameter.requires_grad_(method != FROZEN)
    others = [p for p in model.parameters() if all(p is not q for q in own)]
    stepper = OPTIMIZERS[optimizer]([{"params": others}, {"params": own, "lr": lr * factor}], lr=lr)
    orders = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(split.train_labels), generator=orders).to(device())
        for index in order.split(BATCH)[: len(order) // BATCH]:
            loss = step(model, stepper, split.train_inputs[index], split.train_labels[index])
        if not loss.isfinite():
            break
    with torch.no_grad():
        found = model(split.test_inputs)
        test_loss = F.cross_entropy(found, split.test_labels).item()
        accuracy = 100 * (found.argmax(1) == split.test_labels).double().mean().item()
    return accuracy, test_loss if math.isfinite(test_loss) else BROKEN


def _training(epochs: int, seeds: int, grids: Grids) -> list[dict[str, Any]]:
    full = load("digits").to(device(), torch.float32)
    held, rows = len(full.train_labels) // 10, []
    inputs, labels, *_ = full
    search = Dataset(inputs[held:], labels[held:], inputs[:held], labels[:held])
    for (optimizer, (rates, factors)), method in product(grids.items(), (*METHODS, FROZEN)):
        tried = factors if method != FROZEN else factors[:1]
        losses = {
            (lr, factor): _train(method, optimizer, lr, factor, SEARCH_SEED, epochs, search)[1]
            for lr, factor in product(rates, tried)
        }
        lr, factor = min(losses, key=lambda pair: losses[pair])
        pairs = [_train(method, optimizer, lr, factor, seed, epochs, full) for seed in range(seeds)]
        accuracies, test_losses = zip(*pairs, strict=True)
        about: dict[str, Any] = {"method": method, "optimizer": optimizer, "lr": lr, "factor": factor}
        about["lr_at_edge"] = lr in (min(rates), max(rates))
        about["factor_at_edge"] = method != FROZEN and factor in (min(factors), max(factors))
        about["search"] = [{"lr": r, "factor": f, "validation_loss": loss} for (r, f), loss in losses.items()]
        rows.append({**about, "epochs": epochs, "test_accuracy": list(accuracies), "test_loss": list(test_losses)})
    return rows


def section(result: Mapping[str, Any]) -> Section:
    """Three tables, each with a line that says what it is; a page has a link to that of prices."""
    parts, first = result["alignment"], result["alignment"][0]
    counts = [f"{p['sequences']} sequence{'s' * (p['sequences'] > 1)}" for p in parts]
    names = [count + ", uneven norms" * part["uneven_norms"] for count, part in zip(counts, parts, strict=True)]
    rows: list[Row] = [
        [alike[0]["method"], *map(_aligned, alike)] for alike in zip(*(part["rows"] for part in parts), strict=True)
    ]
    aligned = Table(["query and key projections", *names], rows, name="alignment")
    about_aligned = (
        f"First-order change of the logits under a unit step, against the ideal −g, at initialisation: mean "
        f"cosine ± standard error over {first['draws']} draws (median gain). {first['tokens']} tokens, "
        f"{first['features']} features, {first['heads']} heads; normal inputs and g."
    )
    parts, rows = result["price"], []
    for alike in zip(*(part["rows"] for part in parts), strict=True):
        ratios = [row["time_ratio"] for row in alike]
        rows.append([alike[0]["method"], *map(_ratio, ratios)])
    rows.append(["plain, ms", *(exact(part["plain_ms"], ".2f") for part in parts)])
    rules = "; ".join(f"{name}: {rule}" for name, rule in result["rules"].items())
    header = ["forward and backward, ratio to plain", *(str(tuple(part["shape"])) for part in parts)]
    priced = Table(header, rows, [], "price")
    about_priced = (
        "The whole module, (sequences, tokens, features, heads), float32, softmax as written: median and quartiles "
        f"of rounds within one interleaved run. {rules}. torch {result['environment']['torch']}, "
        f"{result['environment']['threads']} thread(s)."
    )
    trained = grouped(result["training"], itemgetter("method"))
    header, rows = ["query and key projections"], []
    for row in trained["none"]:
        header += [f"{row['optimizer']}, {what}" for what in ("%", "loss", "rate × factor")]
    for method, found in trained.items():
        cells: list[str | Cell] = [method]
        for row in found:
            cells += [estimate(row["test_accuracy"]), estimate(row["test_loss"], 3)]
            cells += [f"{row['lr']:g}{'*' * row['lr_at_edge']} × {row['factor']:g}{'*' * row['factor_at_edge']}"]
        rows.append(cells)
    first = result["training"][0]
    note = (
        f"Digits as 8 tokens of 8 pixels, one attention layer with a residual and no normaliser, width 32, 4 "
        f"heads, batch {BATCH}, {first['epochs']} epochs: test accuracy and loss, mean ± standard error over "
        f"{len(first['test_accuracy'])} seeds. Rate, and its factor on query and key, chosen by validation loss on a "
        "tenth of the training set, one seed, one grid for all methods; * is an edge of the grid."
    )
    return Section([aligned, about_aligned, priced, about_priced, Table(header, rows, name="training"), note])


def _aligned(row: Mapping[str, Any]) -> Cell:
    text = f"{row['cosine']:.3f} ± {row['cosine_error']:.3f} ({row['gain']:.3g})"
    return Cell(text, {"": row["cosine"], "error": row["cosine_error"], "gain": row["gain"]})


def _ratio(row: Mapping[str, Any]) -> Cell:
    low, high = row["quartiles"]
    text = f"{row['median']:.2f} ({low:.2f} to {high:.2f})"
    return Cell(text, {"": row["median"], "low": low, "high": high, "n": row["rounds"]})


_HELP = "the ideal logit step: alignment, price, a small training"
STUDIES = {
    "attention": measurement(
        _HELP, "attention", compare, lambda result, *_: section(result),
        makes=[Recipe(0.5)], page="docs/results/attention.md",
    )
}  # fmt: skip
