"""Sphinx's configuration; scripts/docs.sh builds the site."""

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

import kda

ROOT = Path(__file__).parents[1]

project = "libkda"
author = "the libkda authors"
copyright = author  # noqa: A001 - Sphinx's name
version = release = (ROOT / "VERSION").read_text().strip()

extensions = ["breathe", "myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx-mathjax-offline"]
exclude_patterns = ["numerics/tables/*"]

html_theme = "furo"
html_title = f"libkda {version}"
html_static_path = ["_static"]
html_css_files = ["kda.css"]

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 4

nitpicky = True
nitpick_ignore_regex = [("cpp:identifier", r"kda|kda::reference|size_t|u?int\d+_t")]

DOXYGEN_XML = ROOT / "build" / "docs" / "doxygen" / "xml"
breathe_projects = {"kda": str(DOXYGEN_XML)}
breathe_default_project = "kda"
breathe_default_members = ("members", "undoc-members")
breathe_show_include = False

# torch is a large thing to install for the sake of five signatures.
autodoc_mock_imports = ["torch"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100
# Docstrings are plain text with `code`.
default_role = "code"
highlight_language = "none"


def mark_code(_app: Sphinx, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """Mark the indented formulas of a docstring as code."""
    marked: list[str] = []
    for line in lines:
        before = next((earlier for earlier in reversed(marked) if earlier.strip()), "")
        starts_block = marked and not marked[-1].strip() and _indent(line) > _indent(before)
        if starts_block and not re.match(r"\s*[-.]", before):
            marked += [" " * _indent(before) + "::", ""]
        marked.append(line)
    lines[:] = marked


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip()) if line.strip() else 0


def public_names() -> set[str]:
    """Return what the headers and the Python package offer."""
    names = {f"kda.{name}" for name in kda.__all__ if name not in ("__version__", "reference")}
    for compound in ElementTree.parse(DOXYGEN_XML / "index.xml").getroot():  # noqa: S314 - our own
        name = compound.findtext("name", "")
        if compound.get("kind") in ("class", "struct"):
            names.add(name)
        if compound.get("kind") in ("namespace", "file"):
            prefix = f"{name}::" if compound.get("kind") == "namespace" else ""
            members = [
                m for m in compound.iter("member") if m.get("kind") in ("enum", "function", "typedef", "variable")
            ]
            names |= {prefix + member.findtext("name", "") for member in members}
    return names


def check_that_all_is_documented(_app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of what the reference lacks."""
    documented = {name for domain in ("cpp", "py") for name, *_ in env.get_domain(domain).get_objects()}
    for name in sorted(public_names() - documented):
        logging.getLogger(__name__).warning("%s is not in the reference", name)


def setup(app: Sphinx) -> None:
    """Connect what is ours."""
    app.connect("env-check-consistency", check_that_all_is_documented)
    # Before napoleon, which turns sections into indented fields.
    app.connect("autodoc-process-docstring", mark_code, priority=100)
