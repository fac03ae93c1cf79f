"""The documentation knows every public name."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

import adiv_optim
import adiv_optim.layers

DOCS = Path(__file__).parents[1] / "docs"
PACKAGES = ["adiv_optim", *(f"adiv_optim.{name}" for name in ["diagnostics", "functional", "gauge"])]
PACKAGES += ["adiv_optim.jacobian", "adiv_optim.layers", "adiv_optim.optim", "adiv_optim.rows"]


def public_names(package):
    """What a package exports, but for its modules; of optim and jacobian, what adiv_optim does not export already."""
    module = importlib.import_module(package)
    elsewhere = adiv_optim.__all__ if package in ("adiv_optim.optim", "adiv_optim.jacobian") else []
    return {name for name in module.__all__ if name not in elsewhere and not inspect.ismodule(getattr(module, name))}


def listed_names(page):
    """The names in the autosummary of a page of the reference."""
    (found,) = re.findall(r"\.\. autosummary::\n\n((?:   \S+\n)+)", page)
    return set(found.split())


def mentioned(name, text):
    return re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", text) is not None


@pytest.mark.parametrize("package", PACKAGES)
def test_reference_lists_what_is_public_and_nothing_else(package):
    page = DOCS / "api" / f"{package.rpartition('.')[2]}.md"
    assert listed_names(page.read_text()) == public_names(package), f"edit {page.relative_to(DOCS.parent)}"


def test_every_layer_is_explained():
    pages = [page.read_text() for page in (DOCS / "layers").glob("*.md")]
    names = adiv_optim.layers.__all__
    assert [name for name in names if not any(mentioned(name, page) for page in pages)] == []


def test_what_is_missing_would_be_noticed():
    assert not mentioned("Norm", "LayerNorm, NormLike and nn.Norm")
    assert mentioned("L2Norm", "the layer `L2Norm`")
