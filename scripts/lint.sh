#!/usr/bin/env bash
# What CONTRIBUTING.md says of style, checked: clang-format and the width of lines, ruff, mypy, and clang-tidy over src,
# with the checks of .clang-tidy. clang-tidy sees the kernels as compiled for one instruction set. Needs the .venv of
# ./test.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh

install_packages clang clang-format clang-tidy
tools=$(requirements project optional-dependencies lint)
.venv/bin/pip install -q --disable-pip-version-check $tools

say "clang-format, ruff, mypy"
mapfile -t sources < <(git ls-files '*.c' '*.cc' '*.h' '*.cu' '*.cuh')
clang-format --dry-run -Werror "${sources[@]}"
# clang-format leaves comments as they are.
if LC_ALL=C.UTF-8 grep -nE '^.{121,}' "${sources[@]}"; then
  echo "lines of more than 120 columns" >&2
  exit 1
fi
.venv/bin/ruff check -q .
.venv/bin/ruff format -q --check .
.venv/bin/mypy --no-error-summary

say "clang-tidy"
build=build/tidy
cmake -S . -B "$build" -G Ninja -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_CXX_FLAGS=-DHWY_COMPILE_ONLY_STATIC \
  -DKDA_BUILD_CUDA=OFF >/dev/null
tidy() { run-clang-tidy -p "$build" -quiet "$@" 2>/dev/null | { grep -vE '^clang-tidy|^$' || true; }; }

tidy 'src/(?!.*/kernel\.cc)'
# Offsets within a chunk are ints: at most 256 columns of 128 rows.
tidy 'src/.*/kernel\.cc' -checks=-bugprone-implicit-widening-of-multiplication-result
