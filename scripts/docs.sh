#!/usr/bin/env bash
# Builds the documentation site from docs/ and the comments of headers and functions; a warning is an error. Sets up
# what is missing first.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh

install_packages "${BASE_PACKAGES[@]}" doxygen
make_venv
install_package docs

say "documentation"
mkdir -p build/docs
doxygen docs/Doxyfile
.venv/bin/sphinx-build -W --keep-going -q -d build/docs/doctrees docs build/docs/html
echo "site: build/docs/html/index.html"
