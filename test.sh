#!/usr/bin/env bash
# Sets up what is missing, builds, and runs every test that needs no GPU: C++ (CTest), the example projects, Python, and
# the whole case list through `kda verify`. KDA_TEST_TORCH=0 leaves PyTorch, a large download, and its tests out.
set -euo pipefail
cd "$(dirname "$0")"
source scripts/setup.sh

install_packages "${BASE_PACKAGES[@]}" libbenchmark-dev libgtest-dev nlohmann-json3-dev
make_venv
install_package test
if [ "${KDA_TEST_TORCH:-1}" != 0 ] && ! .venv/bin/python -c 'import torch' 2>/dev/null; then
  say "installing torch 2.13.0"
  .venv/bin/pip install -q --disable-pip-version-check torch==2.13.0
fi
if [ "${KDA_TEST_FLA:-0}" != 0 ] && ! .venv/bin/python -c 'import importlib.metadata as m; m.version("fla-core")' 2>/dev/null; then
  say "installing flash-linear-attention"
  .venv/bin/pip install -q --disable-pip-version-check --no-deps fla-core==0.6.0 einops triton
fi

say "C++"
cmake --preset release >/dev/null
cmake --build --preset release
ctest --preset release

say "Python"
KDA_BUILD_DIR=build/release .venv/bin/python -m pytest -q tests/python

say "every case"
.venv/bin/kda verify
