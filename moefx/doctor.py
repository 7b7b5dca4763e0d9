"""What this machine has, and which kernels that enables."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
import subprocess
from typing import Any


def examine() -> dict[str, Any]:
    """Facts by topic; a missing thing is a fact, not an error."""
    import torch

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu": _cpu(),
        "instruction sets": _instruction_sets(),
        "compiler": _compiler(),
        "gpu": _gpu(),
    }
    for package in ("triton", "deep_gemm", "transformers", "safetensors"):
        found[package] = _version(package)
    found["deep_gemm"] += _deep_gemm(found["deep_gemm"])
    found["torch.distributed"] = _distributed()
    found["kernels"] = _kernels(found)
    return found


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _instruction_sets() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            flags = next(line for line in file if line.startswith(("flags", "Features"))).split()
    except (OSError, StopIteration):
        return "unknown"
    wanted = ("avx2", "fma", "avx512f", "avx512bw", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd", "sve", "bf16")
    return ", ".join(w for w in wanted if w in flags) or "none that moefx knows"


def _compiler() -> str:
    for name in ("c++", "g++", "clang++"):
        path = shutil.which(name)
        if path:
            try:
                return subprocess.run([path, "--version"], capture_output=True, text=True, check=True, timeout=20).stdout.split("\n")[0]
            except (OSError, subprocess.SubprocessError) as error:
                return f"not usable, torch operations are used: {error}"
    return "none: torch operations are used"


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


def _version(package: str) -> str:
    if importlib.util.find_spec(package) is None:
        return "not installed"
    distribution = {"deep_gemm": "sgl-deep-gemm"}.get(package, package)
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "installed, version unknown"


def _deep_gemm(version: str) -> str:
    if version == "not installed":
        return ""
    from moefx.kernels.deep_gemm import library

    why = library.load()[1]
    return f", not usable here: {why}" if why else ""


def _distributed() -> str:
    import torch.distributed as dist

    if not dist.is_available():
        return "not available"
    names = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    return ", ".join(n for n, check in names.items() if check()) or "no backend"


def _kernels(found: dict[str, Any]) -> dict[str, str]:
    from moefx.kernels.cpu import build, experts_bf16
    from moefx.kernels.registry import KERNELS

    gpu = found["gpu"] != "none"
    native = build.library("experts_bf16", experts_bf16.ISA) is not None
    lines = {}
    for kernel in KERNELS:
        where = ["this CPU (torch operations)"]
        if kernel.name.startswith("cpu_"):
            isa = build.isa()
            slower = f"; {build.passed_over()}" if build.passed_over() else ""
            lines[kernel.name] = f"this CPU (C++, {isa}{slower})" if isa is not None else f"not here: {build.why_not('experts')}"
            continue
        if kernel.name == "grouped_mm":
            where.append("this CPU (C++, bf16 with few tokens an expert)" if native else f"no C++ form: {build.why_not('experts_bf16')}")
        if gpu:
            where.append("this GPU")
        lines[kernel.name] = ", ".join(where) + (
            "" if kernel.name != "jit_ep" or found["triton"] != "not installed" else "; its GPU form needs triton"
        )
    return lines


def text() -> str:
    """The facts as lines."""
    lines = []
    for key, value in examine().items():
        if isinstance(value, dict):
            lines.append(f"{key}:")
            lines += [f"  {k}: {v}" for k, v in value.items()]
        else:
            lines.append(f"{key}: {value}")
    return "\n".join(lines)
