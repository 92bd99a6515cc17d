"""The command line `kda`."""

from __future__ import annotations

import os
import sys

_PACKAGES = ("ml_dtypes", "rich", "safetensors", "typer")


def main() -> None:
    """Run the command line; without its packages, say what to install."""
    try:
        from kda.cli.app import app
        from kda.cli.console import output_errors
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _PACKAGES:
            raise
        print(f"kda: the command line needs {package}: pip install 'kda[cli]'", file=sys.stderr)
        raise SystemExit(2) from None
    if os.environ.get("COLUMNS") == "0":  # a width that is not known, in which nothing would be shown
        del os.environ["COLUMNS"]
    with output_errors():
        app(prog_name="kda")
