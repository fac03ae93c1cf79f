"""The package as a whole: import direction, docstrings and doctests."""

import ast
import doctest
import importlib
import inspect
import sys
from functools import cache, cached_property
from graphlib import CycleError, TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import pytest

import adiv_optim
import adiv_optim.layers

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("adiv_optim", "benchmarks")


def module_files():
    """Import name → file, for every module of the repository."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


FILES = module_files()
#: Imported where a model has a layer of the package that they are named after, and not before.
REGISTERING = {"adiv_optim.rows.transformers"}
LIBRARY = [name for name in FILES if not name.startswith("benchmarks")]


def imported(name, path):
    """Yield the full name of everything that a module imports, within its functions too."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base += node.module.split(".") if node.module else []
            yield from (".".join([*base, alias.name]) for alias in node.names)


def import_graph(files):
    """Module → modules that it imports.

    `from . import x` counts as x if x is a module; a package's __init__, which python runs on the way to
    its submodules, is left out unless it is what is named: that is python's doing and no circle.
    """
    modules = {
        name: {each if each in files else each.rpartition(".")[0] for each in imported(name, path)}
        for name, path in files.items()
    }
    return {name: (targets & files.keys()) - {name} for name, targets in modules.items()}


@cache
def graph_of_all():
    return import_graph(FILES)


def find_cycle(graph):
    """A list of modules that import each other in a circle, the first once more at its end, or None."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return None


def test_no_import_cycle():
    assert find_cycle(graph_of_all()) is None


def written(folder, package, sources):
    """Import name → file, of modules of these texts."""
    files = {f"{package}.{name}": folder / f"{name}.py" for name in sources}
    for path, source in zip(files.values(), sources.values(), strict=True):
        path.write_text(source)
    return files


def test_a_planted_import_cycle_is_found(tmp_path):
    sources = {"a": "from . import b", "b": "def f():\n    from p.c import x", "c": "import p.a", "d": "import p.a"}
    files = written(tmp_path, "p", sources)
    assert set(find_cycle(import_graph(files))) == {"p.a", "p.b", "p.c"}
    files["p.c"].write_text("import torch")
    assert find_cycle(import_graph(files)) is None


def imported_packages(files):
    return {each.partition(".")[0] for name, path in files.items() for each in imported(name, path)}


def test_the_library_depends_on_torch_alone(tmp_path):
    library = {name: FILES[name] for name in LIBRARY if name not in REGISTERING}
    assert imported_packages(library) - set(sys.stdlib_module_names) == {"adiv_optim", "torch"}
    planted = written(tmp_path, "p", {"a": "import numpy as np, os.path\ndef f():\n    from scipy.stats import norm"})
    assert imported_packages(planted) == {"numpy", "os", "scipy"}


def test_layers_at_the_top_are_the_packages_own():
    assert (ROOT / "layers").is_symlink()
    assert (ROOT / "layers").resolve() == ROOT / "adiv_optim" / "layers"


#: Private modules at the top, on which every room may stand; they import no room.
FLOOR = "floor"
LEAVES = {"diagnostics", "gauge", "jacobian", "layers"}
#: No more arrows between rooms than this, those to the floor left out.
MOST_ARROWS = 22


def room_of(name):
    """The folder or the loose module of the library that a module stands in, or the floor."""
    room = name.split(".")[1]
    return FLOOR if room.startswith("_") else room


def rooms(graph):
    """The import graph of the rooms in the library: room → rooms that its files import."""
    found = {}
    for name, targets in graph.items():
        if name.count(".") and name.startswith("adiv_optim."):
            room = room_of(name)
            found.setdefault(room, set()).update(room_of(target) for target in targets if target.count("."))
            found[room].discard(room)
    return found


def test_rooms_stand_above_each_other_with_few_arrows_and_the_core_imports_no_leaf():
    graph = rooms(graph_of_all())
    assert {"corrections", "functional", "rows", "attach", "optim"} | LEAVES <= graph.keys()
    assert find_cycle(graph) is None
    assert graph[FLOOR] == set()
    assert [room for room, targets in graph.items() if room not in LEAVES if targets & LEAVES] == []
    assert not any("layers" in targets for targets in graph.values())
    arrows = {(room, target) for room, targets in graph.items() for target in targets - {FLOOR}}
    assert len(arrows) <= MOST_ARROWS, sorted(arrows)


def test_rooms_that_import_each_other_are_found(tmp_path):
    sources = {"up.a": "from ..down import c", "up.b": "", "down.c": "", "down.d": "from ..up.b import f"}
    graph = import_graph(written(tmp_path, "adiv_optim", sources))
    assert find_cycle(graph) is None
    assert set(find_cycle(rooms(graph))) == {"up", "down"}


def private_imports(files):
    """(module, name) where a module imports what begins with an underscore in a folder that it does not stand in."""
    found = []
    for name, path in files.items():
        own = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        for parts in (each.split(".") for each in imported(name, path)):
            hidden = next((at for at, part in enumerate(parts) if part.startswith("_")), None)
            if parts[0] == own[0] and hidden is not None and not parts[hidden].endswith("__"):
                above = files.get(".".join(parts[:hidden]))
                folder = parts[:hidden] if above is None or above.name == "__init__.py" else parts[: hidden - 1]
                if own[: len(folder)] != folder:
                    found.append((name, ".".join(parts)))
    return found


def test_no_room_imports_what_is_private_to_another():
    assert private_imports({name: path for name, path in FILES.items() if name in LIBRARY}) == []


def test_a_planted_import_of_what_is_private_is_found(tmp_path):
    sources = {"_top": "", "up.a": "from .._top import f", "down._c": "", "down.d": "from ._c import _f"}
    sources |= {"up.b": "from ..down._c import f", "up.c": "from ..down.d import _g", "up.d": "from ..down import _c"}
    found = [("p.up.b", "p.down._c.f"), ("p.up.c", "p.down.d._g"), ("p.up.d", "p.down._c")]
    assert private_imports(written(tmp_path, "p", sources)) == found


PUBLIC = [
    (module, name)
    for module in (adiv_optim, adiv_optim.diagnostics, adiv_optim.gauge, adiv_optim.layers)
    for name in module.__all__
]


def undocumented_methods(cls):
    """Public methods and properties without a docstring, which one that overrides a documented one need not have."""
    return [
        f"{cls.__name__}.{name}"
        for name, method in vars(cls).items()
        if not name.startswith("_")
        if inspect.isfunction(method) or isinstance(method, (property, cached_property, classmethod, staticmethod))
        if not any(vars(base)[name].__doc__ for base in cls.__mro__ if name in vars(base))
    ]


def test_a_planted_method_without_a_docstring_is_found():
    def bare(self):
        pass

    def forward(self):
        """Return something."""

    parts = {"forward": bare, "backward": bare, "size": property(bare), "of": classmethod(bare)}
    planted = type("Planted", (type("Documented", (), {"forward": forward}),), parts)
    assert undocumented_methods(planted) == ["Planted.backward", "Planted.size", "Planted.of"]


# torch's own notice: vmap has no batching rule for the operator inside nn.Bilinear and loops instead.
@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented:UserWarning")
@pytest.mark.parametrize("room", sorted({".".join(name.split(".")[:2]) for name in LIBRARY}))
def test_modules_are_documented_and_their_doctests_run(room):
    for name in [name for name in LIBRARY if f"{name}.".startswith(f"{room}.") and (name == room or "." in room)]:
        if name in REGISTERING and not find_spec(name.rpartition(".")[2]):
            continue
        module = importlib.import_module(name)
        assert module.__doc__, name
        classes = [value for value in vars(module).values() if inspect.isclass(value) and value.__module__ == name]
        assert [method for cls in classes if cls.__name__[0] != "_" for method in undocumented_methods(cls)] == []
        assert doctest.testmod(module).failed == 0, name


#: Results of functions whose own examples show them, layers of other dimensions, what is not made by hand, and the
#: rule of one's own in docs/corrections.
SHOWN_ELSEWHERE = {
    "Correction", "Coverage", "Divergence", "Entry", "Factors", "GaussianMoments", "LayerDivergence",
    "PatchNormConv1d", "PatchNormConv3d", "PatchNormConvTranspose1d", "PatchNormConvTranspose3d", "RZScaling",
    "UCBackpropagation", "detach",
}  # fmt: skip


def test_public_classes_and_functions_have_an_example():
    values = [(name, getattr(module, name)) for module, name in PUBLIC]
    callables = [(name, value) for name, value in values if inspect.isclass(value) or inspect.isfunction(value)]
    assert [
        name for name, value in callables if ">>>" not in (value.__doc__ or "") if name not in SHOWN_ELSEWHERE
    ] == []
