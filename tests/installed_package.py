"""Checks an installed kda in an environment that holds nothing else but NumPy: run with that environment's Python."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

import kda

FOLDER = Path(kda.__file__).parent
OWN = r"_kda\..*\.so|libkda\.so\..*|libhwy\.so\..*"
SYSTEM = r"(ld-linux.*|lib(c|dl|gcc_s|m|pthread|rt|stdc\+\+))\.so\..*"


def check(holds: bool, what: str) -> None:
    if not holds:
        sys.exit(f"installed_package.py: {what}")


def check_environment() -> None:
    found = {package.metadata["Name"].lower() for package in importlib.metadata.distributions()}
    check(found <= {"kda", "numpy", "pip", "setuptools"}, f"not a clean environment: {sorted(found)}")


def check_contents() -> None:
    files = [str(file) for file in importlib.metadata.files("kda") or ()]
    for name in ("LICENSE", "THIRD_PARTY_LICENSES.txt"):
        check(any(file.endswith(f".dist-info/licenses/{name}") for file in files), f"{name} is missing")
    for file in files:
        check(not file.endswith((".h", ".cmake", ".a")), f"{file} is of no use to Python")
        check("cuda" not in file, f"{file} is not of the CPU package")


def check_libraries() -> None:
    """The extension's own libraries come from beside it, and the others are glibc's and g++'s."""
    for file in FOLDER.glob("*.so*"):
        listed = subprocess.run(["ldd", file], capture_output=True, text=True, check=True).stdout
        for name, path in re.findall(r"^\s*(\S+)(?: => (.*))? \(0x", listed, re.MULTILINE):
            if re.fullmatch(OWN, name):
                check(Path(path).resolve().parent == FOLDER, f"{file.name} takes {name} from {path}")
            else:
                check(bool(re.fullmatch(f"linux-vdso.*|{SYSTEM}", Path(name).name)), f"{file.name} needs {name}")
        check("not found" not in listed, f"{file.name}: {listed}")
    mapped = {Path(line.split()[-1]) for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    for file in mapped:
        if re.fullmatch(OWN, file.name):
            check(file.parent == FOLDER, f"loaded {file}")


def check_numbers() -> None:
    rng = np.random.default_rng(0)
    B, T, H, K, V = 1, 100, 2, 64, 96
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in rng.standard_normal((2, B, T, H, K)))
    q, k, v = (x.astype(np.float16) for x in (q, k, rng.standard_normal((B, T, H, V))))
    g = -rng.random((B, T, H, K), dtype=np.float32)
    beta = rng.random((B, T, H), dtype=np.float32)
    attn_out, final_state, *_ = kda.chunk_kda_fwd(q, k, v, g, beta, scale=K**-0.5, output_final_state=True)
    exact = kda.reference.chunk_kda_fwd(q, k, v, g, beta, scale=K**-0.5)
    for name, bound, got in (("attn_out", 5e-4, attn_out), ("final_state", 1e-5, final_state)):
        error = np.linalg.norm(got - exact[name]) / np.linalg.norm(exact[name])
        check(error < bound, f"{name} is off by {error}")


def check_command_line() -> None:
    done = subprocess.run([sys.executable, "-I", "-m", "kda", "info"], capture_output=True, text=True, check=False)
    expected = "kda: the command line needs typer: pip install 'kda[cli]'"
    told = re.sub("needs [a-z_]+:", "needs typer:", done.stderr.strip())
    check(done.returncode == 2 and told == expected, f"kda info: {done.returncode}, {done.stderr}")


check_environment()
check_contents()
check_numbers()
check_libraries()
check_command_line()
backends = ", ".join(f"{b.name} {'found' if b.available else 'missing'}" for b in kda.info().backends)
print(f"kda {kda.__version__}, Python {sys.version.split()[0]}, NumPy {np.__version__}: {backends}; all well")
