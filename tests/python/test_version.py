"""VERSION is the one source of the version."""

import importlib.metadata
import re
from pathlib import Path

import kda

ROOT = Path(__file__).parents[2]
VERSION = (ROOT / "VERSION").read_text().strip()


def test_it_is_semantic():
    assert re.fullmatch(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?", VERSION)


def test_everybody_has_it():
    assert kda.__version__ == VERSION
    assert kda.info().version == VERSION
    assert importlib.metadata.version("kda") == VERSION


def test_the_changelog_begins_with_it():
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == VERSION


def test_nobody_else_writes_it_down():
    text = re.escape(VERSION)
    for path in ("CMakeLists.txt", "pyproject.toml", "docs/conf.py", "python/kda/__init__.py", "src/core/info.cc"):
        assert not re.search(rf"(?<![\w.]){text}(?![\w.])", (ROOT / path).read_text()), path
    major_minor = ".".join(VERSION.split(".")[:2])
    for path in ROOT.glob("examples/*/CMakeLists.txt"):
        assert f"find_package(kda {major_minor} " in path.read_text()
