#!/usr/bin/env bash
# Sets up what is missing, builds, and runs chunk_kda_fwd on inputs captured from a trained layer, each output checked
# against the float64 token recurrence.
set -euo pipefail
cd "$(dirname "$0")"
source scripts/setup.sh

install_packages "${BASE_PACKAGES[@]}"
make_venv
install_package cli

say "kda run --check: a slice of a trained layer"
.venv/bin/kda run examples/data/kda_layer.safetensors -o build/demo.safetensors --check
echo
echo "outputs: build/demo.safetensors    next: .venv/bin/kda --help, ./test.sh, README.md"
