"""Every kernel, in order of preference. A new one is a file in this folder and a line here."""
from __future__ import annotations

from moefx.kernels import grouped_mm
from moefx.kernels.base import Kernel

KERNELS: tuple[Kernel, ...] = (grouped_mm.KERNEL,)


def by_name(name: str) -> Kernel:
    """KeyError for an unknown name."""
    return {k.name: k for k in KERNELS}[name]
