"""docs/numerics/measure.py runs, and measures what the page on numerics says."""

import math
import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "numerics"


@pytest.fixture(scope="module")
def measure():
    pytest.importorskip("matplotlib")
    return runpy.run_path(str(FOLDER / "measure.py"))


def test_it_writes_what_the_page_shows(measure, tmp_path):
    measure["main"](tmp_path)
    shown = {path.relative_to(FOLDER) for pattern in ("*.svg", "tables/*.md") for path in FOLDER.glob(pattern)}
    written = {path.relative_to(tmp_path) for path in tmp_path.rglob("*.*")}
    assert written == shown
    for table in (path for path in shown if path.suffix == ".md"):
        labels = [
            [row.split(" | ")[0] for row in (folder / table).read_text().splitlines()] for folder in (FOLDER, tmp_path)
        ]
        assert labels[0] == labels[1]


def test_only_substitution_survives_keys_that_are_alike(measure):
    errors = measure["inverse_errors"]()
    for keys, methods in errors.items():
        assert max(methods["forward substitution"]) < 1e-6
        assert max(methods["blocks of 16 (this library)"]) < 1e-6
        assert max(methods["doubling product"][:1]) < 1e-3
        alike = keys != "random"
        assert (max(methods["doubling product"]) > 1) == alike
        assert (max(methods["naive series"]) > 1) == alike


def test_only_per_step_decays_survive_every_gate(measure):
    errors = measure["pair_errors"]()
    for methods in errors.values():
        assert max(methods["per-step decays (this library)"]) < 2e-6
        assert all(math.isinf(max(found)) for name, found in methods.items() if "this library" not in name)
    half = errors["half of the channels"]
    six = measure["GATES"].index(-6.0)
    assert max(half["one anchor per 16 rows"][:six]) < 1e-6
    assert math.isinf(half["one anchor per 16 rows"][six])
    assert 1e-2 < half["one anchor per 16 rows, clamped"][six] < 1


def test_the_library_is_as_exact_as_rounding_allows(measure):
    for _, attn_out, rounding, final_state in measure["library_errors"]():
        assert attn_out <= 1.05 * rounding
        assert final_state <= 1e-5
