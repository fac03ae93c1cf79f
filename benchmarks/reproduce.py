"""`python -m benchmarks reproduce NAME`: the commands that make every file of results, from nothing."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from .core.store import Store
from .core.table import markdown


class Recipe(NamedTuple):
    """How one file of results is made; a file has the name of its recipe."""

    hours: float  # about, of one core of an AMD EPYC and no GPU
    data: str = "images"  # what it is made of: "images", a "text", or neither
    commands: Sequence[str] = ()  # studies with their options; the study of its own name by default


#: What follows the name of a paper's protocol at a reduced length.
SHORTER = "-reduced"
#: Protocols of the papers: study, hours at its paper's length and at a reduced one.
_PAPERS = {
    "table1": ("table1", 20, 8), "fig2": ("fig2", 30, 6), "fig3": ("fig3", 30, 6), "fig4": ("fig4", 70, 14),
    "fig5": ("fig5", 30, 6), "fig8": ("cnn-pool", 13, 1.2), "fig9": ("cnn", 33, 3), "depth": ("depth", 22, 4),
    "residual": ("residual", 24, 5), "proportions": ("proportions", 9, 2), "elementwise": ("elementwise", 7, 1.4),
    "uc-batch": ("uc-batch", 9, 4), "uc-init": ("uc-init", 2.4, 1), "uc-depth": ("uc-depth", 2.6, 1),
    "uc-long": ("uc-long", 5, 1.2), "isometry-fig7": ("isometry-training", 14, 0.4),
}  # fmt: skip
#: With 3,072 inputs a step of SOAP takes a quarter of a second, for the eigenvectors of its covariances.
_RIVALS = ("--methods none --optimizers soap", "--methods singd --optimizers momentum")
_SHORT = "--preset reduced --epochs 10 --batch-size 128"
#: What is committed under the name of a study is not always of its paper's length.
RECIPES: dict[str, Recipe] = {
    "cifar10": Recipe(0.7),
    "departures": Recipe(0.4, commands=["departures --preset reduced"]),
    "departures-long": Recipe(0.7, commands=[
        "departures --preset paper --departure none centred jpeg --methods affine-like"
    ]),
    "cifar10-tuned": Recipe(1.5),
    "cifar10-trials": Recipe(1.2),
    "cifar10-long": Recipe(0.8),
    "uc-sweep": Recipe(1.1),
    "uc-rescaled": Recipe(0.8),
    "cnn": Recipe(1.2, commands=[f"cnn {_SHORT}"]),
    "cnn-pool": Recipe(1.0, commands=[f"cnn-pool {_SHORT}"]),
    "cnn-tuned": Recipe(2.0),
    "cnn-pool-tuned": Recipe(1.4),
    "mlp-tuned": Recipe(5.5, commands=["mlp-tuned --activations tanh"]),
    "mlp-tuned-leaky": Recipe(5.5, commands=["mlp-tuned --activations leaky-relu"]),
    "mlp-tuned-rivals": Recipe(25.0, commands=[f"mlp-tuned --activations tanh {rival}" for rival in _RIVALS]),
    "mlp-wide-tuned": Recipe(15.0),
    "char-lm": Recipe(4.0, "text", ["char-lm", "char-lm --time"]),
    "char-lm-2000": Recipe(1.0, "text", ["char-lm-2000", "char-lm-2000 --time"]),
    "char-lm-equal-time": Recipe(0.3, "text", [
        "char-lm-equal-time", "char-lm-equal-time --time --methods adamw muon whitened-muon-16 whitened-adamw-16",
    ]),
    "char-lm-rows": Recipe(0.5, "text", ["char-lm-rows --seeds 5"]),
    "char-lm-wrappers": Recipe(1.6, "text"),
    "norm-free": Recipe(11.0, "text"),
    "norm-free-2000": Recipe(9.0, "text"),
    "norm-free-deep": Recipe(4.0, "text"),
    "digits": Recipe(0.02, ""),
    "digits-tuned": Recipe(0.1, ""),
    "rates": Recipe(0.2, ""),
    "divergence": Recipe(0.1, ""),
    "digits-mechanism": Recipe(0.05, "", ["mechanism --tuned {out}/digits-tuned.jsonl"]),
    "mechanism": Recipe(0.6, commands=["mechanism --tuned {out}/cifar10-tuned.jsonl --seeds 1"]),
    "coordinates": Recipe(8.0, ""),
    "poisson": Recipe(4.0, ""),
    "tabular": Recipe(0.8, ""),
    "isometry-depth": Recipe(0.02, ""),
    "normalisers-plane": Recipe(0.01, ""),
    "isometry-training": Recipe(0.4, commands=["isometry-training --preset reduced"]),
    "isometry-widths": Recipe(0.02),
    "speed": Recipe(0.7),
    **{name: Recipe(hours, commands=[f"{study} --preset paper"]) for name, (study, hours, _) in _PAPERS.items()},
    **{name + SHORTER: Recipe(hours, commands=[f"{study} --preset reduced"])
       for name, (study, _, hours) in _PAPERS.items()},
}  # fmt: skip


def arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser this command's options."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="of --list; committed: all that have results")
    parser.add_argument("--list", action="store_true", help="what there is, and how long each takes")
    parser.add_argument("--data", default="cifar10", help="the images: cifar10, or imagefolder:PATH")
    parser.add_argument("--text", default="data/tinyshakespeare.txt", help="the text of the language models")


def run(options: argparse.Namespace, main: Callable[[list[str]], int], committed: Path) -> int:
    """Make the files that are named, or list all of them; `main` is the command line itself."""
    there = {path.stem for path in committed.glob("*.jsonl")}
    if options.list or not options.names:
        rows = []
        for name, recipe in RECIPES.items():
            count = str(len(Store(committed / f"{name}.jsonl").read())) if name in there else ""
            made = "; ".join(recipe.commands) or name
            rows.append([name, made, recipe.data or "none", f"{recipe.hours:g}", count])
        print(markdown(["name", "python -m benchmarks …", "data", "hours of one core", "runs committed"], rows))
        print("\ntorchrun --nproc-per-node N -m benchmarks reproduce NAME divides the hours by about N cores.")
        return 0
    known = [name for name in RECIPES if name in there]  # in this order: some read what others have made
    names = [name for given in options.names for name in (known if given == "committed" else [given])]
    if unknown := [name for name in names if name not in RECIPES]:
        raise ValueError(f"no results are called {unknown[0]!r}; `reproduce --list` has all names.")
    return max(main(command) for name in names for command in commands(name, options))


def commands(name: str, options: argparse.Namespace) -> list[list[str]]:
    """The command lines that make one file of results."""
    recipe = RECIPES[name]
    data = {"images": options.data, "text": options.text}.get(recipe.data)
    common = ["--name", name, "--out", str(options.out), *(["--data", data] if data else [])]
    common += ["--threads", str(options.threads)] if options.threads else []
    return [[*command.format(out=options.out).split(), *common] for command in recipe.commands or [name]]
