"""Every code block of README.md and the other documents is run, or checked as far as it can be.

- The Python blocks of a document are one program; what a line with `print` writes is in its comment.
- C and C++ blocks with a `main` are compiled against the installed library and run; others are compiled only, and may
  include internal headers.
- CMake blocks belong into the project of a user, which is configured and built.
- Shell blocks run at the root of a checkout.
- A block "text output" is what the C, C++ or shell block before it writes.
- A block behind `<!-- not run: reason -->` is only compiled; a shell block is checked for syntax, and that it names
  programs and presets that exist.
"""

import doctest
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = [
    page for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "tests/**/*.md") for page in ROOT.glob(pattern)
]
CHECKED = {"python", "c", "cpp", "cmake", "sh"}
# Not there on every machine that runs the tests.
OPTIONAL_MODULES = {"fla", "torch"}
COMPILERS = {"c": ["cc", "-std=c11"], "cpp": ["c++", "-std=c++20"]}
SUFFIXES = {"c": ".c", "cpp": ".cc"}
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    code: str
    is_run: bool = True
    output: str | None = None

    def __str__(self):
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page):
    blocks = []
    is_run = True
    for token in MarkdownIt().parse(page.read_text()):
        if token.type == "fence":
            if token.info == "text output":
                blocks[-1] = blocks[-1]._replace(output=token.content)
            else:
                blocks.append(Block(page, token.map[0] + 1, token.info, token.content, is_run))
        is_run = not (token.type == "html_block" and token.content.startswith("<!-- not run: "))
    return blocks


BLOCKS = [block for page in sorted(PAGES) for block in blocks_of(page)]


def in_languages(*languages):
    return pytest.mark.parametrize("block", [b for b in BLOCKS if b.language in languages], ids=str)


# The commands of this environment first.
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def run(command, cwd):
    environment = os.environ | {"PATH": PATH}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_output(block, got):
    if block.output is not None:
        checker = doctest.OutputChecker()
        assert checker.check_output(block.output, got, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE), got


@pytest.fixture
def checkout(tmp_path):
    """A folder that looks like the root of a checkout, to write into."""
    for entry in ROOT.iterdir():
        if entry.name not in {".git", ".venv", "build"}:
            (tmp_path / entry.name).symlink_to(entry)
    return tmp_path


@pytest.fixture(scope="session")
def prefix(tmp_path_factory):
    """Where the C++ build is installed."""
    build = os.environ.get("KDA_BUILD_DIR", "")
    if not (ROOT / build / "cmake_install.cmake").exists():
        pytest.skip("KDA_BUILD_DIR names no build")
    prefix = tmp_path_factory.mktemp("prefix")
    for component in ("runtime", "development"):
        run(["cmake", "--install", ROOT / build, "--prefix", prefix, "--component", component], ROOT)
    return prefix


@pytest.mark.parametrize("page", sorted({b.page for b in BLOCKS if b.language == "python"}), ids=lambda page: page.name)
def test_python(page, checkout):
    # Blocks keep their lines, so that a traceback tells where in the document it went wrong.
    lines = [""] * len(page.read_text().splitlines())
    for block in blocks_of(page):
        if block.language == "python" and not block.is_run:
            compile(block.code, str(block), "exec")
        elif block.language == "python":
            lines[block.line : block.line + block.code.count("\n")] = block.code.splitlines()
    for module in OPTIONAL_MODULES & set(re.findall(r"^(?:import|from) (\w+)", "\n".join(lines), re.MULTILINE)):
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    program = checkout / f"{page.stem}_blocks.py"
    program.write_text("\n".join(lines))
    promised = [line.partition("  # ")[2] for line in lines if line.lstrip().startswith("print(")]
    command = [sys.executable, "-W", "error::DeprecationWarning:__main__", program]
    assert run(command, checkout).splitlines() == promised


@in_languages("c", "cpp")
def test_compiled(block, tmp_path, request):
    source = tmp_path / f"block{SUFFIXES[block.language]}"
    source.write_text(block.code)
    compiler = [*COMPILERS[block.language], *WARNINGS, source]
    if not block.is_run or not re.search(r"\bmain\(", block.code):
        run([*compiler, "-fsyntax-only", "-I", ROOT / "include", "-I", ROOT / "src"], tmp_path)
        return
    prefix = request.getfixturevalue("prefix")
    library = next(prefix.glob("lib*/**/libkda.so"))
    program = tmp_path / "block"
    run([*compiler, "-o", program, "-I", prefix / "include", library, f"-Wl,-rpath,{library.parent}"], tmp_path)
    check_output(block, run([program], tmp_path))


@in_languages("cmake")
def test_cmake(block, tmp_path, prefix):
    opening = "" if "project(" in block.code else "cmake_minimum_required(VERSION 3.25)\nproject(user LANGUAGES CXX)\n"
    (tmp_path / "CMakeLists.txt").write_text(opening + block.code)
    for program in ("c/main.c", "cpp/main.cc"):
        shutil.copy(ROOT / "examples" / program, tmp_path)
    run(["cmake", "-S", ".", "-B", "build", f"-DCMAKE_PREFIX_PATH={prefix}", "-DCMAKE_BUILD_TYPE=Debug"], tmp_path)
    run(["cmake", "--build", "build"], tmp_path)


@in_languages("sh")
def test_shell(block, checkout):
    if block.is_run:
        check_output(block, run(["bash", "-euo", "pipefail", "-c", block.code], checkout))
        return
    run(["bash", "-n", "-c", block.code], checkout)
    presets = {preset["name"] for preset in json.loads((ROOT / "CMakePresets.json").read_text())["configurePresets"]}
    for line in block.code.replace("\\\n", " ").splitlines():
        words = [word for word in shlex.split(line, comments=True) if not re.match(r"\w+=", word)]
        if words:
            is_built = words[0].startswith("build/")
            assert is_built or (ROOT / words[0]).is_file() or shutil.which(words[0], path=PATH), words[0]
            assert "--preset" not in words or words[words.index("--preset") + 1] in presets


def test_there_are_no_others():
    """A block in any other language, or in none, would go unchecked."""
    directives = re.compile(r"\{(toctree|math|eval-rst|include|literalinclude|figure|doxygen\w+)\}")
    others = [b for b in BLOCKS if b.language not in CHECKED | {"text"} and not directives.match(b.language)]
    assert not others, ", ".join(f"{block} is in {block.language!r}" for block in others)
    assert not [block for block in BLOCKS if block.output is not None and block.language not in {"c", "cpp", "sh"}]
