"""Settings of the documentation, which `make docs` builds without asking any network."""

import importlib
import pydoc
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

import adiv_optim

# The programs to copy, which a story reads, stand beside the documentation.
sys.path.insert(0, str(Path(__file__).parents[1]))

logger = logging.getLogger(__name__)

project = "adiv_optim"
version = release = adiv_optim.__version__

extensions = [
    "myst_parser",
    "sphinx-mathjax-offline",  # MathJax and its fonts, so that no page asks another host
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
]
# Stories of gallery/, run when the pages are built: an assertion that fails ends the build.
sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "stories",
    "abort_on_example_error": True,
    "within_subsection_order": "FileNameSortKey",
    "download_all_examples": False,
    "show_signature": False,
    "thumbnail_size": (720, 360),
    "write_computation_times": False,
    "reset_modules": (),
}
# It is given for a space anywhere in the path of the clone; names of stories have none.
suppress_warnings = ["sphinx_gallery.space_in_filename"]
exclude_patterns = ["gallery"]
copybutton_exclude = ".linenos, .gp, .go"  # prompts and outputs of examples
html_theme = "furo"
html_title = f"adiv_optim {version}"
#: Where the repository is; pages lead there from their headers once it is known.
REPOSITORY = ""
html_theme_options = {}
if REPOSITORY:
    html_theme_options = {"source_repository": REPOSITORY, "source_branch": "main", "source_directory": "docs/"}
html_show_copyright = False
html_static_path = ["_static"]
html_css_files, html_js_files = ["fit.css"], ["tables.js"]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

autosummary_generate = False
autodoc_default_options = {"members": True, "imported-members": True, "show-inheritance": True}
autodoc_inherit_docstrings = False  # torch's words on overriding a method are no reference of ours
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_custom_sections = ["Shape"]
# In docstrings `Name` is a name: of this library, of torch, or of an argument.
default_role = "py:obj"
# References that lead nowhere fail the build; `leads_elsewhere` says which may.
nitpicky = True

PACKAGES = ("layers", "jacobian", "functional", "diagnostics", "gauge", "optim", "rows")
#: Public name → the name it is documented by.
DOCUMENTED = {
    name: f"{module}.{name}"
    for module in (*(f"adiv_optim.{package}" for package in PACKAGES), "adiv_optim")
    for name in importlib.import_module(module).__all__
    if name not in PACKAGES
}

#: What reStructuredText reads as markup, of which bars and lone stars are norms and shapes in a docstring.
MARKUP = re.compile(r"`[^`]*`|\*\*.+?\*\*|\*[^*\s](?:[^*]*[^*\s])?\*|[|*]")


def keep_bars(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Let |x| and (N, *) in docstrings be what they look like; equations and examples are left alone."""
    equation, example = None, False
    for at, line in enumerate(lines):
        if not line.strip():
            example = False
            continue
        indent = len(line) - len(line.lstrip())
        if line.lstrip().startswith(".. math::"):
            equation = indent
        elif equation is not None and indent <= equation:
            equation = None
        example = example or line.lstrip().startswith(">>>")
        if equation is None and not example:
            lines[at] = MARKUP.sub(lambda found: f"\\{found[0]}" if len(found[0]) == 1 else found[0], line)


def plain_defaults(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Write the default of a dataclass's dict as {}: what Python prints for it tears the signature."""
    return signature and signature.replace("<factory>", "{}"), returned


def public_name(app: Sphinx, env: BuildEnvironment, node: pending_xref, text: nodes.Element) -> nodes.Element | None:
    """Lead `Proportional`, `gauge.trace` and adiv_optim.corrections.Proportional to where they are documented."""
    module, _, name = node["reftarget"].rpartition(".")
    ours = not module or module.split(".")[0] in ("adiv_optim", *PACKAGES)
    if node.get("refdomain") != "py" or not ours or name not in DOCUMENTED:
        return None
    target = DOCUMENTED[name]
    return env.domains["py"].resolve_xref(env, node["refdoc"], app.builder, "obj", target, node, text)


def leads_elsewhere(app: Sphinx, domain: Any, node: pending_xref) -> bool:
    """Whether a name is not of this library, or is one that it does not publish: then a warning would be wrong."""
    target = node["reftarget"]
    return node.get("refdomain") == "py" and (not target.startswith("adiv_optim.") or pydoc.locate(target) is not None)


def undocumented(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of public names without an entry in the reference."""
    for target in set(DOCUMENTED.values()) - env.domains["py"].objects.keys():
        logger.warning("%s is public, and not in docs/api", target)


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("env-check-consistency", undocumented)
    app.connect("autodoc-process-docstring", keep_bars)
    app.connect("autodoc-process-signature", plain_defaults)
    app.connect("missing-reference", public_name)
    app.connect("warn-missing-reference", leads_elsewhere)
