"""Sphinx: the API reference is made of the docstrings, everything else of the pages beside this file.

pip install -e ".[docs]" && sphinx-build -W --keep-going -b html docs build/docs
"""

import ast
import importlib
import inspect
import itertools
import re
from typing import Any

from flax import nnx
from sphinx.util.inspect import stringify_signature

import mla_jax

project = "mla_jax"
author = "the mla_jax authors"
version = release = mla_jax.__version__
copyright = "the mla_jax authors, Apache-2.0"

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "myst_parser"]
exclude_patterns = ["build"]
html_theme = "furo"
html_title = f"mla_jax {release}"
html_copy_source = False

# A reference to something of ours must resolve. Types of other projects are not linked: that would need the network.
PACKAGES = ("mla_jax", "mla_jax.layers", "mla_jax.models")
OURS = "|".join(name for package in PACKAGES for name in vars(importlib.import_module(package)) if name[0] != "_")
nitpicky = True
nitpick_ignore_regex = [
    ("py:class", rf"(?!mla_jax\.|(?:{OURS})(?:\.\w+)?$).*"),
    ("py:class", r"mla_jax\.(arrays|checks|devices|dispatch)\..*"),
]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100
python_display_short_literal_types = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_attr_annotations = False  # the signature has them

myst_heading_anchors = 3


def data_docstring(name: str) -> list[str]:
    """The string below the assignment of a constant or an alias that a package exports: Python itself does not keep it."""
    package, attribute = name.rsplit(".", 1)
    module = importlib.import_module(package)
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ImportFrom) and any(alias.asname == attribute for alias in node.names):
            module = importlib.import_module(str(node.module))
    body = ast.parse(inspect.getsource(module)).body
    for node, below in itertools.pairwise(body):
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == attribute and isinstance(below, ast.Expr):
            return inspect.cleandoc(ast.literal_eval(below.value)).splitlines()
    return []


def fill_in_data(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    if what == "data":
        lines[:] = data_docstring(name)


def shorten(app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, result: str | None) -> Any:
    """Types as the source spells them: ``Float[Array, 'T'] | Float[ndarray, 'T']`` is ``Float[ArrayIn, 'T']``."""

    def short(text: str | None) -> str | None:
        if text is None:
            return None
        text = re.sub(r"~?(?:[a-z_]\w*\.)+(?=[A-Z])", "", text)
        text = re.sub(r"<class 'jax\.numpy\.(\w+)'>", r"jnp.\1", text)
        text = re.sub(r"str \| type\[Any\] \| (~?numpy\.)?dtype \| SupportsDType", "DTypeLike", text)
        return re.sub(r"(\w+)\[Array, ('[^']*')\] \| \1\[ndarray, \2\]", r"\1[ArrayIn, \2]", text)

    if what == "class" and issubclass(obj, nnx.Module):
        # The metaclass hides the parameters.
        own = inspect.signature(obj.__init__)
        own = own.replace(parameters=list(own.parameters.values())[1:], return_annotation=inspect.Signature.empty)
        signature = stringify_signature(own, unqualified_typehints=True, short_literals=True)
    return short(signature), short(result)


def setup(app: Any) -> None:
    # Before napoleon, which turns Google's sections into fields.
    app.connect("autodoc-process-docstring", fill_in_data, priority=100)
    app.connect("autodoc-process-signature", shorten)
