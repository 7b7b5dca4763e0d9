"""The C++ form of routed experts in bf16 for few rows an expert: what it takes, and the call."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from moefx import ops
from moefx.activation.spec import Activation
from moefx.kernels.cpu import build

ISA = "avx512_bf16"
KINDS = ("swiglu", "swiglu_oai")
_CLAMPS = {None: 0, "pre": 1, "post": 2}


def takes(x: torch.Tensor, ids: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, act: Activation) -> bool:
    """bf16, sizes in multiples of 32, contiguous weights, a sigmoid-gated activation, and a library for this host."""
    return (
        x.dtype == w13.dtype == w2.dtype == torch.bfloat16
        and act.kind in KINDS
        and x.shape[1] % 32 == 0
        and w2.shape[2] % 32 == 0
        and w13.is_contiguous()
        and w2.is_contiguous()
        and ids.numel() < 2**31
        and build.library("experts_bf16", ISA) is not None
    )


def run(x, ids, weights, w13, b13, w2, b2, act: Activation, first: int) -> torch.Tensor:
    """The experts op on tensors that `takes` accepted; torch's number of threads."""
    library = build.library("experts_bf16", ISA)
    assert library is not None
    tokens, hidden, top_k = ops.sizes(x, ids, weights)
    experts, _, width = w2.shape
    if w2.shape[1] != hidden or w13.shape != (experts, 2 * width, hidden):
        raise ValueError(f"x is {tuple(x.shape)}, w13 {tuple(w13.shape)} and w2 {tuple(w2.shape)}: give [T, H], [E, 2 D, H] and [E, H, D]")
    x, ids, scale = x.contiguous(), ids.to(torch.int64).contiguous(), weights.float().contiguous()
    b13, b2 = (None if b is None else b.contiguous() for b in (b13, b2))
    out = torch.empty(tokens, hidden, dtype=torch.bfloat16)
    size, real = ctypes.c_int64, ctypes.c_float
    threads = torch.get_num_threads()
    short = library.moefx_experts_bf16(
        *(_pointer(t) for t in (x, ids, scale, w13, b13, w2, b2, out)),
        *(size(n) for n in (tokens, top_k, hidden, width, experts, first)),
        (size * 4)(*_columns(act, width)),
        ctypes.c_int(_CLAMPS[act.clamp]),
        *(real(v) for v in (act.limit or 0.0, act.alpha, act.beta)),
        ctypes.c_int(threads),
    )
    if short:
        raise MemoryError(f"no memory, or no threads, for the bf16 experts of {tokens} rows on {threads} threads: take fewer rows a call")
    return out


def _pointer(tensor: torch.Tensor | None) -> Any:
    return ctypes.c_void_p(0 if tensor is None else tensor.data_ptr())


def _columns(act: Activation, width: int) -> tuple[int, int, int, int]:
    """(gate's first row, its step, up's first row, its step)."""
    first, second = ((0, 2), (1, 2)) if act.columns.startswith("interleaved") else ((0, 1), (width, 1))
    gate, up = (second, first) if act.columns.endswith("up_first") else (first, second)
    return (*gate, *up)
