"""Build a C++ kernel with the host's compiler, once for each source, flags and compiler; load it by ctypes.

Flags are those of one instruction set, not `-march=native`, so that every one the host has can be built and tested on it. The shared
object lies in the user's cache folder under a hash of all that decides it (in the temporary folder where there is no home, or none that
can be written to); it is written under another name and renamed, so that several processes may build at once. Its last bytes are a
SHA-256 of the others: a damaged library would kill the process, so it is built again. `library` returns None, and `why_not` says why,
where there is no compiler, the host lacks an instruction, or the build fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

FLAGS = ("-O3", "-std=c++20", "-shared", "-fPIC", "-pthread", "-fvisibility=hidden")
_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
INSTRUCTIONS = {
    "avx512_bf16": (*_AVX512, "avx512vbmi", "avx512_vnni", "avx512_bf16"),
    "avx512": _AVX512,
    "avx2": _AVX2,
}
"""CPU flags, as /proc/cpuinfo names them, of each instruction set kernels are written for; the best first."""

_DIGEST = hashlib.sha256().digest_size
_REASONS: dict[str, str] = {}
_FAILED: dict[tuple[str, str], str] = {}


@functools.cache
def isa(name: str = "experts") -> str | None:
    """The best instruction set of this host for which kernel `name` was built; None (and `why_not` says why) without one."""
    return next((i for i in INSTRUCTIONS if library(name, i) is not None), None)


def planned_isa(name: str = "experts") -> str | None:
    """The same as far as it is known without building: the host's instruction sets and compiler, and builds that failed in this process."""
    if _compiler() is None:
        return None
    return next((i for i, flags in INSTRUCTIONS.items() if cpu_flags() >= set(flags) and (name, i) not in _FAILED), None)


def _compiler() -> str | None:
    return shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


@functools.cache
def library(name: str, isa: str) -> ctypes.CDLL | None:
    """The library of `<name>.cpp` beside this file for an instruction set, or None."""
    missing = [f for f in INSTRUCTIONS[isa] if f not in cpu_flags()]
    compiler = _compiler()
    if missing:
        _REASONS[name] = f"this CPU has no {', '.join(missing)}"
    elif compiler is None:
        _REASONS[name] = "no C++ compiler was found"
    else:
        try:
            return _loaded(name, isa, compiler)
        except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            text = getattr(error, "stderr", None) or str(error)
            _REASONS[name] = f"the build failed: {text.strip().splitlines()[0] if text.strip() else type(error).__name__}"
            _FAILED[name, isa] = _REASONS[name]
    return None


def why_not(name: str) -> str | None:
    """Why the last `library(name, ...)` was None; None when all were built or never asked for."""
    return _REASONS.get(name)


def passed_over(name: str = "experts") -> str:
    """The instruction sets this host has for which `name` could not be built, and why; empty without one."""
    return "; ".join(f"{isa}: {why}" for (of, isa), why in _FAILED.items() if of == name)


@functools.cache
def cpu_flags() -> frozenset[str]:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return frozenset(next((line for line in file if line.startswith("flags")), "").split())
    except OSError:
        return frozenset()


def command(compiler: str, name: str, isa: str, target: Path, extra: tuple[str, ...] = ()) -> list[str]:
    """The compiler's command line; `extra` flags come last."""
    instructions = [f"-m{flag.replace('avx512_', 'avx512')}" for flag in INSTRUCTIONS[isa]]
    wide = ["-mprefer-vector-width=512"] if isa != "avx2" else []
    return [compiler, *FLAGS, *instructions, *wide, *extra, str(Path(__file__).with_name(f"{name}.cpp")), "-o", str(target)]


def _loaded(name: str, isa: str, compiler: str) -> ctypes.CDLL:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=20).stdout
    here = Path(__file__).parent
    sources = [path.read_text() for path in (here / f"{name}.cpp", *sorted(here.glob("*.h")))]
    flags = command(compiler, name, isa, Path())
    key = hashlib.sha256("\0".join([*sources, *(f for f in flags if f.startswith("-")), version]).encode()).hexdigest()[:20]
    reasons = []
    for folder in (_user_folder, _temporary_folder):
        try:
            target = folder() / f"{name}-{isa}-{key}.so"
            if not _whole(target):
                _build(target, name, isa, compiler)
            return ctypes.CDLL(str(target))
        except (OSError, RuntimeError) as error:
            reasons.append(str(error))
    raise OSError("; ".join(reasons))


def _user_folder() -> Path:
    """RuntimeError without HOME where the user has no passwd entry either, as in containers."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moefx"


def _temporary_folder() -> Path:
    """A folder that this user alone can write to: else others could leave a library there for us to load."""
    user = os.geteuid()
    folder = Path(tempfile.gettempdir()) / f"moefx-{user}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != user or found.st_mode & 0o022:
        raise OSError(
            f"{folder} is not a folder that user {user} alone can write to: remove it, or set XDG_CACHE_HOME to a folder of yours"
        )
    return folder


def _whole(library: Path) -> bool:
    """Whether the file is there and ends in the SHA-256 of what comes before."""
    if not library.exists():
        return False
    code = library.read_bytes()
    return code[-_DIGEST:] == hashlib.sha256(code[:-_DIGEST]).digest()


def _build(target: Path, name: str, isa: str, compiler: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        subprocess.run(command(compiler, name, isa, made), capture_output=True, text=True, check=True, timeout=120)
        code = made.read_bytes()
        made.write_bytes(code + hashlib.sha256(code).digest())
        made.replace(target)
