"""Every kernel, in order of preference. A new one is a file in this folder and a line here."""

from __future__ import annotations

import re

from moefx.contract import Predicate
from moefx.kernels import fp8_fallback, grouped_mm
from moefx.kernels.base import Kernel
from moefx.kernels.cpu import kernel as cpu
from moefx.kernels.deep_gemm import kernel as deep_gemm
from moefx.kernels.jit_ep import kernel as jit_ep
from moefx.options import PRECISIONS, TARGETS, check_choice

KERNELS: list[Kernel] = [*cpu.KERNELS, jit_ep.KERNEL, fp8_fallback.KERNEL, *deep_gemm.FP8, grouped_mm.KERNEL, *deep_gemm.BF16]


def register(kernel: Kernel, before: str | None = None) -> None:
    """Make a kernel a candidate, in front of the one named `before` (default: of all).

    TypeError for what is no `Kernel`; ValueError, with the remedy, for a name that is taken, unknown or unreadable and for a contract that
    can't be read.
    """
    if not isinstance(kernel, Kernel):
        raise TypeError(f"register expects a moefx.kernels.base.Kernel, got {type(kernel).__name__}")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", kernel.name) or kernel.contract.kernel != kernel.name:
        raise ValueError(f"a kernel and its contract have one name in lower_case, got {kernel.name!r} and {kernel.contract.kernel!r}")
    for value in kernel.contract.targets:
        check_choice("target", value, TARGETS)
    for value in kernel.contract.precisions:
        check_choice("precision", value, PRECISIONS)
    if not all(isinstance(p, Predicate) for p in kernel.contract.predicates):
        raise ValueError(f"the predicates of {kernel.name} must be moefx.contract.Predicate objects")
    names = [k.name for k in KERNELS]
    if kernel.name in names:
        raise ValueError(f"a kernel named {kernel.name!r} is registered already; give the new one another name")
    if before is not None and before not in names:
        raise ValueError(f"before={before!r} is no registered kernel; choose one of {', '.join(names)}")
    KERNELS.insert(0 if before is None else names.index(before), kernel)


def by_name(name: str) -> Kernel:
    """KeyError for an unknown name."""
    return {k.name: k for k in KERNELS}[name]
