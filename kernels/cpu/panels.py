"""Weights in panels of 64 columns: what the C++ kernel reads, made from a model's tensors, and back where nothing was rounded.

| storage | panels [E, P, steps, ...] | k step |
|---|---|---|
| bf16 | bfloat16 [E, P, ceil(K/2), 64, 2] | 2 |
| fp16, fp32 | the same type [E, P, K, 64, 1] | 1 |
| e4m3 | uint8 [E, P, ceil(K/2), 128], scales fp32 [E, P, ceil(K/128), 2]: one for each half panel | 2 |
| int8 | int8 [E, P, ceil(K/4), 64, 4], scales fp32 [E, 64 P], corrections int32 [E, 64 P] (128 * the column's sum) | 4 |

K is the inner dimension. A panel of a gated product is 32 columns of gate, then the same 32 of up; P = ceil(D/32). Else P = ceil(N/64).
Columns and inner elements beyond the matrix are zero.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from moefx import ops
from moefx.activation.spec import Activation
from moefx.kernels.cpu import build, operators

PANEL = 64
GROUP = 128
BF16, F16, F32, FP8, FP8_WEIGHT_ONLY, INT8 = range(6)
OWN = -1  # the storage of the weights' own type
TYPES = {torch.bfloat16: BF16, torch.float16: F16, torch.float32: F32}
_DEPTH = {BF16: 2, F16: 1, F32: 1, FP8: 2, INT8: 4}


def loaded() -> ctypes.CDLL:
    """The library for this host, its operators known to torch; RuntimeError where there is none (the kernels' contracts ask for one)."""
    isa = build.isa()
    library = build.library("experts", isa) if isa is not None else None
    if library is None:
        raise RuntimeError(f"the C++ kernel of routed experts is not available: {build.why_not('experts')}")
    operators.install(library, openmp())
    return library


@functools.cache
def openmp() -> int:
    """The entry point of the OpenMP library torch runs on, or 0."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value or 0
    except AttributeError:
        return 0


def rows(act: Activation, width: int) -> tuple[int, int, int, int]:
    """(gate's first row, its step, up's first row, its step) of gate_up weights."""
    first, second = ((0, 2), (1, 2)) if act.columns.startswith("interleaved") else ((0, 1), (width, 1))
    gate, up = (second, first) if act.columns.endswith("up_first") else (first, second)
    return (*gate, *up)


def _shapes(w: torch.Tensor, storage: int, gated: bool) -> tuple[int, int, int]:
    """(panels, steps, width) of [E, N, K]."""
    width = w.shape[1] // 2 if gated else w.shape[1]
    return -(-width // (PANEL // 2 if gated else PANEL)), -(-w.shape[2] // _DEPTH[storage]), width


def _empty(parts: list[torch.Tensor], storage: int, gated: bool) -> list[torch.Tensor]:
    w = parts[0]
    own = w.dtype if w.dtype in TYPES else torch.float32
    storage = TYPES[own] if storage == OWN else storage
    panels, steps, _ = _shapes(w, storage, gated)
    experts = sum(p.shape[0] for p in parts)
    if storage == FP8:
        groups = -(-w.shape[2] // GROUP)
        scales = w.new_empty((experts, panels, groups, 2), dtype=torch.float32)
        return [w.new_empty((experts, panels, steps, 2 * PANEL), dtype=torch.uint8), scales]
    depth = _DEPTH[storage]
    made = w.new_empty((experts, panels, steps, PANEL, depth), dtype=torch.int8 if storage == INT8 else own)
    if storage != INT8:
        return [made]
    return [made, *(w.new_empty((experts, panels * PANEL), dtype=t) for t in (torch.float32, torch.int32))]


def in_large_pages(fresh: torch.Tensor) -> torch.Tensor:
    """The same tensor; its memory, not yet written, will lie in large pages where the system has them."""
    loaded().moefx_large_pages(ctypes.c_void_p(fresh.data_ptr()), ctypes.c_int64(fresh.nbytes))
    return fresh


def _pack(parts: list[torch.Tensor], storage: int, gated: bool, activation: str) -> list[torch.Tensor]:
    made = _empty(parts, storage, gated)
    in_large_pages(made[0])
    first = 0
    for part in parts:
        w = part if part.dtype in TYPES else part.float()
        own = [t[first : first + w.shape[0]] for t in made]
        _copy(w, own, TYPES[w.dtype] if storage == OWN else storage, gated, activation, False)
        first += w.shape[0]
    return made


def _pack_fake(parts: list[torch.Tensor], storage: int, gated: bool, activation: str) -> list[torch.Tensor]:
    del activation
    return _empty(parts, storage, gated)


def _copy(w: torch.Tensor, made: list[torch.Tensor], storage: int, gated: bool, activation: str, back: bool) -> None:
    panels, steps, width = _shapes(w, storage, gated)
    where = rows(Activation.decode(activation), width) if gated else (0, 1, 0, 1)
    pointers = [t.data_ptr() for t in (w, *made)] + [0] * (3 - len(made))
    call = struct.pack(
        "@20q", *pointers, w.shape[0], width, w.shape[2], *w.stride(), TYPES[w.dtype], storage, gated, *where, panels, steps,
        torch.get_num_threads(),
    ) + struct.pack("@2q", openmp(), back)  # fmt: skip
    if loaded().moefx_pack(call):
        raise MemoryError("packing weights for the CPU kernel ran out of memory")


_pack_op: Any = ops.define("cpu_pack(Tensor[] parts, int storage, bool gated, str activation) -> Tensor[]", _pack, _pack_fake)
_TENSORS = {OWN: 1, FP8: 2, INT8: 3}


def pack(w: torch.Tensor | Sequence[torch.Tensor], storage: int, gated: bool, activation: str) -> tuple[torch.Tensor, ...]:
    """The tensors of the table for weights [E, N, K] in any strides; `gated`: N holds gate and up as the activation's columns say.

    A list stands for what its weights are joined to along E, without that copy.
    One op and indices into its result: a graph that packs is traced again when it is copied.
    """
    made = _pack_op([w] if isinstance(w, torch.Tensor) else list(w), storage, gated, activation)
    return tuple(made[i] for i in range(_TENSORS[storage]))


def unpack(panels: torch.Tensor, shape: tuple[int, int, int], gated: bool, activation: str) -> torch.Tensor:
    """The weights [E, N, K] of bf16, fp16 or fp32 panels, bit for bit."""
    plain = panels.new_empty(shape)
    _copy(plain, [panels], TYPES[panels.dtype], gated, activation, True)
    return plain


def _pack_bias(bias: torch.Tensor, gated: bool, activation: str) -> torch.Tensor:
    if not gated:
        return F.pad(bias.to(torch.float32, copy=True), (0, -bias.shape[1] % PANEL))
    half = PANEL // 2
    sides = [F.pad(s.float(), (0, -s.shape[1] % half)).unflatten(1, (-1, half)) for s in Activation.decode(activation).split(bias)]
    return torch.cat(sides, 2).flatten(1)


_pack_bias_op: Any = ops.define("cpu_pack_bias(Tensor bias, bool gated, str activation) -> Tensor", _pack_bias, _pack_bias)


def pack_bias(bias: torch.Tensor | Sequence[torch.Tensor] | None, gated: bool, activation: str) -> torch.Tensor | None:
    """[E, N], or a list joined along E -> fp32 [E, 64 P] in the panels' order."""
    if bias is None:
        return None
    return _pack_bias_op(bias if isinstance(bias, torch.Tensor) else torch.cat(list(bias)), gated, activation)


def unpack_bias(packed: torch.Tensor | None, columns: int, gated: bool, activation: str, dtype: torch.dtype) -> torch.Tensor | None:
    """The bias [E, columns] that `pack_bias` was given."""
    if packed is None:
        return None
    plain = packed.new_empty((packed.shape[0], columns), dtype=dtype)
    if not gated:
        return plain.copy_(packed[:, :columns])
    sides = packed.unflatten(1, (-1, 2, PANEL // 2)).unbind(2)
    for to, side in zip(Activation.decode(activation).split(plain), sides, strict=True):
        to.copy_(side.flatten(1)[:, : columns // 2])
    return plain


def plain(panels: torch.Tensor) -> torch.Tensor:
    """[E, 64 P, K], K padded to the step: the matrix panels hold, gate and up still in turn, in plain torch; e4m3 as such."""
    if panels.dim() == 4:  # e4m3: see the C++ for the order inside a step
        parts = panels.unflatten(3, (2, 4, 2, 4, 2)).permute(0, 1, 3, 5, 4, 6, 2, 7)
        return parts.flatten(1, 5).flatten(2).view(torch.float8_e4m3fn)
    return panels.permute(0, 1, 3, 2, 4).flatten(3).flatten(1, 2)


def halves(matrix: torch.Tensor) -> torch.Tensor:
    """[E, 64 P, ...] with gate and up in turn -> gate rows in front of up rows."""
    return matrix.unflatten(1, (-1, 2, PANEL // 2)).transpose(1, 2).flatten(1, 3)
