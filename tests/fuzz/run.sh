#!/usr/bin/env bash
# tests/fuzz/run.sh [SECONDS]: builds the fuzz targets and runs each on its seeds for so long (45). What is new goes to
# build/fuzz/corpus, an input that fails to build/fuzz.
set -euo pipefail
cd "$(dirname "$0")/../.."

cmake --preset fuzz >/dev/null
cmake --build --preset fuzz
for target in plan c_api safetensors; do
  corpus=build/fuzz/corpus/$target
  mkdir -p "$corpus"
  "build/fuzz/tests/fuzz/fuzz_$target" -max_total_time="${1:-45}" -max_len=1024 -len_control=0 -timeout=120 -verbosity=0 \
    -print_final_stats=1 -artifact_prefix="build/fuzz/$target-" "$corpus" "tests/fuzz/seeds/$target"
done
