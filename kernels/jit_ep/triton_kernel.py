"""`jit_ep_act_quant` in Triton: one program for each (512 columns, row, expert).

Loads are widened to fp32 at once; the limit arrives rounded to bf16, so that the clamp in fp32 is the clamp in bf16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moefx.kernels import fp8

GROUPS_PER_PROGRAM = 4


@triton.jit
def act_quant_kernel(h, masked_m, q, scales, rows, columns, limit, HAS_LIMIT: tl.constexpr, UE8M0: tl.constexpr):
    """h [E, rows, 2 * columns] bf16, q [E, rows, columns] e4m3, scales fp32 [E, rows, columns / 128] or int32 [E, columns / 512, rows]."""
    block = tl.program_id(0)
    row = tl.program_id(1)
    expert = tl.program_id(2)
    if row < tl.load(masked_m + expert):
        group = tl.arange(0, 4)
        column = block * 512 + group[:, None] * 128 + tl.arange(0, 128)[None, :]
        source = h + (expert.to(tl.int64) * rows + row) * (2 * columns)
        gate = tl.load(source + column).to(tl.float32)
        up = tl.load(source + columns + column).to(tl.float32)
        if HAS_LIMIT:
            gate = tl.where(gate > limit, limit, gate)
            up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        value = gate / (1.0 + tl.exp(-gate)) * up
        amax = tl.max(tl.abs(value), axis=1)
        scale = tl.where(amax > 1e-10, amax, 1e-10) / 448.0
        if UE8M0:
            bits = scale.to(tl.int32, bitcast=True)
            code = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
            scale = (code << 23).to(tl.float32, bitcast=True)
            word = tl.sum(code << (8 * group), axis=0)
            tl.store(scales + (expert.to(tl.int64) * (columns // 512) + block) * rows + row, word)
        else:
            tl.store(scales + (expert.to(tl.int64) * rows + row) * (columns // 128) + block * 4 + group, scale)
        scaled = value / scale[:, None]
        scaled = tl.where(scaled > 448.0, 448.0, tl.where(scaled < -448.0, -448.0, scaled))
        tl.store(q + (expert.to(tl.int64) * rows + row) * columns + column, scaled.to(q.dtype.element_ty))


def launch(h: torch.Tensor, masked_m: torch.Tensor, limit: float | None, ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel on device tensors; shapes as in `moefx.kernels.jit_ep.activation`. ValueError for columns that are no multiple of 512."""
    experts, rows, both = h.shape
    columns = both // 2
    if columns % (GROUPS_PER_PROGRAM * fp8.BLOCK):
        raise ValueError(f"D = {columns} is no multiple of 512 (G % 4 == 0); the contract of jit_ep refuses it, use fp8_fallback")
    q = torch.zeros(experts, rows, columns, dtype=fp8.E4M3, device=h.device)
    if ue8m0:
        scales = torch.zeros(experts, columns // 512, rows, dtype=torch.int32, device=h.device)
    else:
        scales = torch.zeros(experts, rows, columns // 128, dtype=torch.float32, device=h.device)
    rounded = 0.0 if limit is None else float(torch.tensor(limit, dtype=torch.bfloat16))
    grid = (columns // 512, rows, experts)
    act_quant_kernel[grid](h, masked_m, q, scales, rows, columns, rounded, HAS_LIMIT=limit is not None, UE8M0=ue8m0, num_warps=4)
    return q, scales.transpose(1, 2) if ue8m0 else scales
