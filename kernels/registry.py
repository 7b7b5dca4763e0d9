"""Every kernel, in order of preference. A new one is a file in this folder and a line here."""

from __future__ import annotations

from moefx.kernels import fp8_fallback, grouped_mm
from moefx.kernels.base import Kernel
from moefx.kernels.cpu import kernel as cpu
from moefx.kernels.deep_gemm import kernel as deep_gemm
from moefx.kernels.jit_ep import kernel as jit_ep

KERNELS: list[Kernel] = [*cpu.KERNELS, jit_ep.KERNEL, fp8_fallback.KERNEL, *deep_gemm.FP8, grouped_mm.KERNEL, *deep_gemm.BF16]


def register(kernel: Kernel, before: str | None = None) -> None:
    """Make a kernel a candidate, in front of the one named `before` (default: of all). ValueError for a name that is taken or unknown."""
    names = [k.name for k in KERNELS]
    if kernel.name in names:
        raise ValueError(f"a kernel named {kernel.name!r} is registered already; give the new one another name")
    if before is not None and before not in names:
        raise ValueError(f"before={before!r} is no registered kernel; choose one of {', '.join(names)}")
    KERNELS.insert(0 if before is None else names.index(before), kernel)


def by_name(name: str) -> Kernel:
    """KeyError for an unknown name."""
    return {k.name: k for k in KERNELS}[name]
