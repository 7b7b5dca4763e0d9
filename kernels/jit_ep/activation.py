"""The fused expert-parallel activation: silu(gate) * up with clamp and group-128 FP8 quantisation, on the masked layout.

`jit_ep_act_quant(h [E, N, 2D] bf16, masked_m [E] int32, limit, ue8m0)` -> (q e4m3 [E, N, D], scales)

- gate in the first D columns; with a limit L: silu(min(gate, L)) * clamp(up, -L, L), the clamp in bf16, the product in fp32;
- scales per 128 columns: fp32 [E, N, G], or with ue8m0 int32 [E, N, G/4] (four exponents each, stored as [E, G/4, N]);
- rows past masked_m: q and scales are zero.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moefx import ops
from moefx.kernels import fp8


def product(h: torch.Tensor, limit: float | None) -> torch.Tensor:
    """silu(gate) * up in fp32 of bf16 h [.., 2D], clamped in bf16 before."""
    gate, up = h.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate.float()) * up.float()


def _cpu(h: torch.Tensor, masked_m: torch.Tensor, limit: float | None, ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    experts, rows, columns = h.shape
    groups = columns // 2 // fp8.BLOCK
    q = torch.zeros(experts, rows, columns // 2, dtype=fp8.E4M3)
    scales = torch.zeros(experts, rows, groups)
    for e, m in enumerate(masked_m.tolist()):
        if m:
            q[e, :m], scales[e, :m] = fp8.quantize_groups(product(h[e, :m], limit), ue8m0)
    return q, fp8.pack_ue8m0(scales) if ue8m0 else scales


def _fake(h, masked_m, limit, ue8m0):
    experts, rows, columns = h.shape
    q = h.new_empty(experts, rows, columns // 2, dtype=fp8.E4M3)
    groups = columns // 2 // fp8.BLOCK
    if ue8m0:
        return q, h.new_empty(experts, groups // 4, rows, dtype=torch.int32).transpose(1, 2)
    return q, h.new_empty(experts, rows, groups, dtype=torch.float32)


def _cuda(h, masked_m, limit, ue8m0):
    from moefx.kernels.jit_ep.triton_kernel import launch

    return launch(h, masked_m, limit, ue8m0)


act_quant = ops.define(
    "jit_ep_act_quant(Tensor h, Tensor masked_m, float? limit, bool ue8m0) -> (Tensor, Tensor)", _cpu, _fake, device="CPU"
)
ops.implement("jit_ep_act_quant", _cuda, "CUDA")
