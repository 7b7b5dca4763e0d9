"""Build a C++ kernel with the host's compiler, once for each source, flags, compiler and instruction set; load it by ctypes.

The shared object lies in the user's cache folder under a hash of all of these; it is written under another name and renamed, so that
several processes may build at once. `library` returns None, and `why_not` says why, where there is no compiler, the host lacks an
instruction the source needs, or the build fails.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

FLAGS = ("-O3", "-std=c++20", "-march=native", "-shared", "-fPIC", "-pthread")
_REASONS: dict[str, str] = {}


@functools.cache
def library(name: str, needs: tuple[str, ...]) -> ctypes.CDLL | None:
    """The library of `<name>.cpp` beside this file, or None; `needs` are CPU flags as /proc/cpuinfo names them."""
    missing = [n for n in needs if n not in cpu_flags()]
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if missing:
        _REASONS[name] = f"this CPU has no {', '.join(missing)}"
    elif compiler is None:
        _REASONS[name] = "no C++ compiler was found"
    else:
        try:
            return ctypes.CDLL(str(_built(name, compiler)))
        except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            text = getattr(error, "stderr", None) or str(error)
            _REASONS[name] = f"the build failed: {text.strip().splitlines()[0] if text.strip() else type(error).__name__}"
    return None


def why_not(name: str) -> str | None:
    """Why `library(name, ...)` was None; None when it was built or never asked for."""
    return _REASONS.get(name)


@functools.cache
def cpu_flags() -> frozenset[str]:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return frozenset(next((line for line in file if line.startswith("flags")), "").split())
    except OSError:
        return frozenset()


def _built(name: str, compiler: str) -> Path:
    source = Path(__file__).with_name(f"{name}.cpp")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=20).stdout
    key = hashlib.sha256("\0".join([source.read_text(), *FLAGS, version, *sorted(cpu_flags())]).encode()).hexdigest()[:20]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moefx"
    target = folder / f"{name}-{key}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / target.name
        subprocess.run([compiler, *FLAGS, str(source), "-o", str(made)], capture_output=True, text=True, check=True, timeout=120)
        made.replace(target)
    return target
