"""Grouped GEMMs in the model's own precision: the default, and the last resort of every precision.

Rows are sorted by expert once. Then either both products are one `torch.nn.functional.grouped_mm` each (CUDA; a CPU in bf16 with few rows
an expert), or each expert that was hit is two GEMMs over its slice of the rows. Weights are taken as they are, transposed views too.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moefx import ops
from moefx.activation.spec import Activation
from moefx.contract import Contract, Pad, Predicate
from moefx.kernels.base import Kernel, as_given
from moefx.kernels.cpu import experts_bf16

LOOP_ROWS = 32  # rows an expert from which one GEMM per expert is quicker on a CPU than torch's grouped GEMM


def _on_cpu(x, ids, weights, w13, b13, w2, b2, activation, first=0):
    ops.sizes(x, ids, weights)
    if ids.numel() == 0:
        return x.new_zeros(x.shape[0], w2.shape[1])
    few = ids.numel() < LOOP_ROWS * w13.shape[0]
    if few and experts_bf16.takes(x, ids, w13, w2, Activation.decode(activation)):
        return experts_bf16.run(x, ids, weights, w13, b13, w2, b2, Activation.decode(activation), first)
    if few and x.dtype == torch.bfloat16 and _aligned(w13) and _aligned(w2):
        return _grouped(x, ids, weights, w13, b13, w2, b2, activation, first)
    return _one_by_one(x, ids, weights, w13, b13, w2, b2, activation, first)


def _aligned(weight: torch.Tensor) -> bool:
    """torch's grouped GEMM wants strides of 16 bytes."""
    return all(s == 1 or s * weight.element_size() % 16 == 0 for s in weight.stride()) and weight.data_ptr() % 16 == 0


def _one_by_one(x, ids, weights, w13, b13, w2, b2, activation, first):
    tokens, top_k = ids.shape
    act = Activation.decode(activation)
    wide = torch.promote_types(torch.promote_types(x.dtype, weights.dtype), torch.float32)
    order, bounds = _sort(ids, first, w13.shape[0])
    token = torch.div(order, top_k, rounding_mode="floor")
    rows, scale = x.index_select(0, token), weights.reshape(-1).to(wide)
    out = torch.zeros(tokens, w2.shape[1], dtype=wide)
    for e, begin, end in _hit(bounds):
        h = act(F.linear(rows[begin:end], w13[e], None if b13 is None else b13[e]))
        y = F.linear(h, w2[e], None if b2 is None else b2[e])
        out.index_add_(0, token[begin:end], y.to(wide) * scale[order[begin:end], None])
    return out.to(x.dtype)


def _sort(ids: torch.Tensor, first: int, count: int) -> tuple[torch.Tensor, list[int]]:
    """Rows (t * K + k) in expert order and the bounds of every local expert in them."""
    flat = ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    edges = torch.arange(first, first + count + 1, dtype=flat.dtype, device=flat.device)
    return order, torch.searchsorted(flat[order], edges).tolist()


def _hit(bounds: list[int]):
    return [(e, b, bounds[e + 1]) for e, b in enumerate(bounds[:-1]) if bounds[e + 1] > b]


def _grouped(x, ids, weights, w13, b13, w2, b2, activation, first=0):
    tokens, _, top_k = ops.sizes(x, ids, weights)
    count = w13.shape[0]
    flat = ids.reshape(-1) - first
    local = (flat >= 0) & (flat < count)
    flat = torch.where(local, flat, count)
    order = torch.argsort(flat, stable=True)
    expert = flat[order].clamp_max(count - 1)
    offs = torch.searchsorted(flat[order], torch.arange(1, count + 1, device=flat.device)).to(torch.int32)
    y = F.grouped_mm(x.index_select(0, order // top_k), w13.transpose(1, 2), offs=offs)
    h = Activation.decode(activation)(y if b13 is None else y + b13[expert])
    y = F.grouped_mm(h, w2.transpose(1, 2), offs=offs)
    y = y if b2 is None else y + b2[expert]
    wide = torch.promote_types(weights.dtype, torch.float32)
    scaled = torch.where(local[order, None], y.to(wide) * weights.reshape(-1)[order, None].to(wide), 0)
    return torch.zeros(tokens, w2.shape[1], dtype=wide, device=x.device).index_add_(0, order // top_k, scaled).to(x.dtype)


def _fake(x, ids, weights, w13, b13, w2, b2, activation, first=0):
    return x.new_empty(x.shape[0], w2.shape[1])


_SCHEMA = (
    "experts_grouped_mm(Tensor x, Tensor ids, Tensor weights, Tensor w13, Tensor? b13, Tensor w2, Tensor? b2, str activation, "
    "int first=0) -> Tensor"
)

KERNEL = Kernel(
    name="grouped_mm",
    contract=Contract(
        "grouped_mm",
        predicates=(
            Predicate("weight_format in ('bfloat16', 'float16', 'float32', 'float64')", "GEMMs run in the storage type"),
            Predicate("target == 'cpu' or weight_format != 'float64'", "torch's grouped_mm on a GPU takes bf16, fp16 and fp32"),
            Predicate("target == 'cpu' or H % 8 == 0", "strides of torch's grouped_mm on a GPU are multiples of 16 bytes"),
            Predicate("target == 'cpu' or D % 8 == 0", "strides of torch's grouped_mm on a GPU are multiples of 16 bytes"),
        ),
        precisions=("preserve", "fp8", "fp8_weight_only", "int8"),
        targets=("cpu", "sm90", "sm100", "gfx942", "gfx950"),
        pads=(Pad("D", 8), Pad("H", 8)),
    ),
    pack=as_given,
    op=ops.define(_SCHEMA, _on_cpu, _fake, device="CPU"),
    reference=ops.experts,
)
ops.implement("experts_grouped_mm", _grouped, "CUDA")
