"""FP8 experts with clamp, activation and quantisation as separate steps: the way out when the fused activation kernel does not hold.

Any named activation, any sizes, biases. The clamp of the model is applied here as everywhere; it is never assumed away.
"""

from __future__ import annotations

import torch

from moefx import ops
from moefx.activation.spec import Activation
from moefx.contract import Contract, Predicate
from moefx.kernels import fp8, fp8_experts, masked
from moefx.kernels.base import Kernel


def act_quant(h: torch.Tensor, act: Activation) -> tuple[torch.Tensor, torch.Tensor]:
    """h [.., 2D or D] -> e4m3 [.., D] and fp32 group scales: the activation in fp32, its result in h's dtype, then quantised."""
    return fp8.quantize_groups(act(h.float()).to(h.dtype))


def _experts(x, ids, weights, q13, s13, b13, q2, s2, b2, activation, first=0):
    ops.sizes(x, ids, weights)
    act, dtype = fp8_experts.packed_activation(activation, fp8_experts.product_dtype(x)), fp8_experts.product_dtype(x)
    at = masked.layout(ids, first, q13.shape[0])
    q, s = fp8.quantize_groups(x)
    h = masked.gemm(_scatter(q, at, ids), masked.scatter(s, at, ids.shape[1]), q13, s13, at.masked_m, dtype)
    h = h if b13 is None else h + b13.unsqueeze(1)
    q, s = act_quant(h, act)
    y = masked.gemm(q, s, q2, s2, at.masked_m, dtype)
    y = y if b2 is None else y + b2.unsqueeze(1)
    return masked.combine(y, weights, at).to(x.dtype)


def _scatter(q: torch.Tensor, at: masked.Layout, ids: torch.Tensor) -> torch.Tensor:
    return masked.scatter(q.view(torch.uint8), at, ids.shape[1]).view(fp8.E4M3)


def _fake(x, ids, weights, q13, s13, b13, q2, s2, b2, activation, first=0):
    return x.new_empty(x.shape[0], q2.shape[1])


SCHEMA = (
    "(Tensor x, Tensor ids, Tensor weights, Tensor q13, Tensor s13, Tensor? b13, Tensor q2, Tensor s2, Tensor? b2, str activation, "
    "int first=0) -> Tensor"
)

KERNEL = Kernel(
    name="fp8_fallback",
    contract=Contract(
        "fp8_fallback",
        predicates=(
            Predicate("activation != 'opaque'", "an activation kept as it was stays outside any kernel"),
            fp8_experts.QUANTISABLE,
        ),
        precisions=("fp8",),
        targets=("cpu", "sm90", "sm100", "gfx942", "gfx950"),
    ),
    pack=fp8_experts.pack,
    op=ops.define(f"experts_fp8_fallback{SCHEMA}", _experts, _fake),
    reference=fp8_experts.reference(act_quant),
    lossy=True,
    weight_bytes=1,
    row_bytes=14,
)
