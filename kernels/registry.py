"""Every kernel, in order of preference. A new one is a file in this folder and a line here."""

from __future__ import annotations

from moefx.kernels import fp8_fallback, grouped_mm
from moefx.kernels.base import Kernel
from moefx.kernels.cpu import kernel as cpu
from moefx.kernels.jit_ep import kernel as jit_ep

KERNELS: tuple[Kernel, ...] = (*cpu.KERNELS, jit_ep.KERNEL, fp8_fallback.KERNEL, grouped_mm.KERNEL)


def by_name(name: str) -> Kernel:
    """KeyError for an unknown name."""
    return {k.name: k for k in KERNELS}[name]
