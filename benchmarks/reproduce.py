"""`python -m benchmarks reproduce NAME`: the commands that make every file of results, from nothing."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tyro

from .catalogue import RECIPES, STUDIES
from .core.runs import check_known
from .core.store import Store
from .core.study import Absent, Options
from .core.tables import markdown


@dataclass
class ReproduceOptions(Options):
    """Options of `reproduce`."""

    name: Absent[str] = ""
    names: tyro.conf.Positional[tuple[str, ...]] = ()  # of --list; committed: all that have results
    list: bool = False  # what there is, and how long each takes
    data: str = "cifar10"  # the images: cifar10, or imagefolder:PATH
    text: str = "data/tinyshakespeare.txt"  # the text of the language models


def run(options: ReproduceOptions, main: Callable[[list[str]], int], committed: Path) -> int:
    """Make the files that are named, or list all of them; `main` is the command line itself."""
    stores = {name: Store(committed / f"{name}.jsonl") for name in RECIPES}
    if options.list or not options.names:
        rows = [
            [name, "; ".join(recipe.commands(study)), needs(name), f"{recipe.hours:g}", str(len(stores[name].read()))]
            for name, (study, recipe) in RECIPES.items()
        ]
        print(markdown(["name", "python -m benchmarks …", "data", "hours of one core", "runs committed"], rows))
        print("\ntorchrun --nproc-per-node N -m benchmarks reproduce NAME divides the hours by about N cores.")
        return 0
    known = [name for name, store in stores.items() if store.read()]  # in this order: some read what others have made
    names = [name for given in options.names for name in (known if given == "committed" else [given])]
    check_known("results", names, RECIPES)
    return max(main(command) for name in names for command in commands(name, options))


def needs(name: str) -> str:
    """What a file of results is made of: "images", a "text", or what its study has by itself."""
    study, recipe = RECIPES[name]
    return STUDIES[study].data if recipe.data is None else recipe.data


def commands(name: str, options: ReproduceOptions) -> list[list[str]]:
    """The command lines that make one file of results."""
    study, recipe = RECIPES[name]
    data = {"images": options.data, "text": options.text}.get(needs(name))
    common = ["--name", name, "--out", str(options.out), *(["--data", data] if data else [])]
    common += ["--threads", str(options.threads)] if options.threads else []
    # Split before they are filled in: the folder's path may have a space in it.
    parts = [command.split() for command in recipe.commands(study)]
    return [[*(part.format(out=options.out) for part in each), *common] for each in parts]
