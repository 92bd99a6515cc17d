# Sourced by demo.sh and test.sh: makes a fresh Debian machine ready and installs the package into .venv. Does only what
# is missing, so that a second run takes seconds.

say() { printf '\033[1m== %s\033[0m\n' "$*"; }

# Debian packages, where any is missing.
install_packages() {
  local missing=() package
  for package in "$@"; do
    dpkg-query -W -f '${Status}\n' "$package" 2>/dev/null | grep -q '^install ok installed$' || missing+=("$package")
  done
  [ ${#missing[@]} -eq 0 ] && return
  say "installing Debian packages: ${missing[*]}"
  local sudo=()
  if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null; then
      echo "need root (or sudo) to install: ${missing[*]}" >&2
      return 1
    fi
    sudo=(sudo)
  fi
  "${sudo[@]}" apt-get update -qq
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

# The requirements that pyproject.toml has under the keys given, for pip.
requirements() {
  .venv/bin/python -c 'import functools, sys, tomllib
print(*functools.reduce(dict.get, sys.argv[1:], tomllib.load(open("pyproject.toml", "rb"))))' "$@"
}

# The virtual environment, with what builds the package: what pyproject.toml says. pip asks no index for what is there.
make_venv() {
  if [ ! -x .venv/bin/pip ]; then
    say "creating .venv"
    python3 -m venv .venv
  fi
  local requires
  requires=$(requirements build-system requires)
  .venv/bin/pip install -q --disable-pip-version-check $requires cmake ninja
}

# The package with the given extras, again only when a source is newer than the last installation. Without the CUDA
# backend, which takes minutes to compile and which neither the demo nor the tests that call this can use.
install_package() {
  local extras=$1 stamp=.venv/.installed-$1
  if [ -e "$stamp" ] && [ -z "$(find pyproject.toml CMakeLists.txt VERSION cmake include src python tests/op_cases -newer "$stamp" -print -quit)" ]; then
    return
  fi
  say "building and installing the Python package"
  .venv/bin/pip install -q --disable-pip-version-check --no-build-isolation --config-settings=build-dir=build/python \
    --config-settings=cmake.define.KDA_BUILD_CUDA=OFF ".[$extras]"
  touch "$stamp"
}

BASE_PACKAGES=(build-essential cmake ninja-build libhwy-dev python3-dev python3-venv)
