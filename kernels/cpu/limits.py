"""What this machine can do, measured by a C++ loop: bytes read a second and products a second, on torch's number of threads."""

from __future__ import annotations

import ctypes

import torch

from moefx.kernels.cpu import build
from moefx.kernels.cpu.panels import openmp

_KINDS = {"bf16": 0, "fp32": 1, "int8": 2}


def _library() -> ctypes.CDLL:
    isa = build.isa("limits")
    library = build.library("limits", isa) if isa is not None else None
    if library is None:
        raise RuntimeError(f"the machine's limits can't be measured: {build.why_not('limits')}")
    library.moefx_bytes_a_second.restype = library.moefx_flops.restype = ctypes.c_double
    return library


def _measured(rate: float) -> float:
    if rate < 0:
        raise MemoryError(
            f"no memory, or no threads, to measure this machine on {torch.get_num_threads()} threads: torch.set_num_threads fewer"
        )
    return rate


def bytes_a_second(memory: torch.Tensor) -> float:
    """Reading `memory` once, from two streams a thread. RuntimeError without a compiler or a known instruction set."""
    size = ctypes.c_int64(memory.numel() * memory.element_size())
    base, gomp = ctypes.c_void_p(memory.data_ptr()), ctypes.c_void_p(openmp())
    return _measured(_library().moefx_bytes_a_second(base, size, torch.get_num_threads(), gomp))


def flops(kind: str) -> float:
    """Multiplications and additions a second in registers: "bf16", "fp32" or "int8"; 0 where the host has no such instruction."""
    return _measured(_library().moefx_flops(_KINDS[kind], torch.get_num_threads(), ctypes.c_void_p(openmp())))
