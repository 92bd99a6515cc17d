#!/usr/bin/env bash
# clang-tidy over src, with the checks of .clang-tidy. The kernels are seen as compiled for one instruction set.
set -euo pipefail
cd "$(dirname "$0")/.."

build=build/tidy
cmake -S . -B "$build" -G Ninja -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_CXX_FLAGS=-DHWY_COMPILE_ONLY_STATIC \
  -DKDA_BUILD_CUDA=OFF >/dev/null
tidy() { run-clang-tidy -p "$build" -quiet "$@" 2>/dev/null | { grep -vE '^clang-tidy|^$' || true; }; }

tidy 'src/(?!.*/kernel\.cc)'
# Offsets within a chunk are ints: at most 256 columns of 128 rows.
tidy 'src/.*/kernel\.cc' -checks=-bugprone-implicit-widening-of-multiplication-result
