"""Experts on the JIT expert-parallel activation kernel: FP8 masked GEMM -> fused activation and quantisation -> FP8 masked GEMM.

The contract is that of the public kernel, whatever runs here: an implementation of this name keeps it.
"""

from __future__ import annotations

import torch

from moefx import ops
from moefx.activation.spec import Activation
from moefx.contract import Contract, Predicate
from moefx.kernels import fp8, fp8_experts, fp8_fallback, masked, value_checks
from moefx.kernels.base import Kernel
from moefx.kernels.jit_ep.activation import act_quant, product


def _experts(x, ids, weights, q13, s13, b13, q2, s2, b2, activation, first=0):
    ops.sizes(x, ids, weights)
    limit = Activation.decode(activation).limit
    at = masked.layout(ids, first, q13.shape[0])
    if value_checks.ON:
        total = int(at.masked_m.sum())
        value_checks.require(total <= at.rows * ids.shape[1], "sum(masked_m) <= N * K", f"{total} rows, N = {at.rows}, K = {ids.shape[1]}")
    q, s = fp8.quantize_groups(x)
    spread = masked.scatter(q.view(torch.uint8), at, ids.shape[1]).view(fp8.E4M3)
    h = masked.gemm(spread, masked.scatter(s, at, ids.shape[1]), q13, s13, at.masked_m, torch.bfloat16)
    q, s = act_quant(h, at.masked_m, limit, False)
    y = masked.gemm(q, s, q2, s2, at.masked_m, torch.bfloat16)
    return masked.combine(y, weights, at).to(x.dtype)


def _plain(h: torch.Tensor, act: Activation) -> tuple[torch.Tensor, torch.Tensor]:
    return fp8.quantize_groups(product(h, act.limit))


KERNEL = Kernel(
    name="jit_ep",
    contract=Contract(
        "jit_ep",
        predicates=(
            Predicate("N % 4 == 0", "packed UE8M0 scales: rows in fours"),
            Predicate("G % 4 == 0", "four group scales share one int32"),
            Predicate("D // 8 >= E", "one thread for 8 outputs, and the same block scans masked_m with one thread an expert"),
            Predicate("D % 128 == 0", "quantisation groups of 128"),
            Predicate("(D // 8) % 32 == 0", "whole warps"),
            Predicate("0 < D // 8 <= 1024", "threads of one block"),
            Predicate("E <= 256", "fixed-size scan of masked_m"),
            Predicate("H % 128 == 0", "the masked FP8 GEMM around it scales the hidden size in groups of 128"),
            Predicate("dtype == 'bfloat16'", "the only input type compiled"),
            Predicate("activation == 'swiglu'", "the fused formula is silu(gate) * up"),
            Predicate("clamp in (None, 'pre')", "its clamp comes before the activation"),
            Predicate("bias == False", "no bias is added between the GEMMs"),
            fp8_experts.QUANTISABLE,
        ),
        value_checks=("sum(masked_m) <= N * K",),
        precisions=("fp8",),
        targets=("sm90", "sm100", "gfx942", "gfx950"),
    ),
    pack=fp8_experts.pack,
    op=ops.define(
        f"experts_jit_ep{fp8_fallback.SCHEMA}",
        _experts,
        lambda x, ids, w, q13, s13, b13, q2, s2, b2, activation, first=0: x.new_empty(x.shape[0], q2.shape[1]),
    ),
    reference=fp8_experts.reference(_plain),
    lossy=True,
    weight_bytes=1,
    row_bytes=10,
)
