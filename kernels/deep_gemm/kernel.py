"""Experts on DeepGEMM's grouped GEMMs (SM90, SM100), in FP8 and bf16, in the masked and the contiguous layout.

The layouts, their padding and the scales are made here; the products are the library's on a GPU and plain PyTorch on a CPU. FP8 scales
are powers of two on both architectures (SM100 wants UE8M0, SM90 takes any fp32), and the data is quantised with those very scales.
No call on an empty rank or with no tokens: the library asserts positive sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moefx import ops
from moefx.activation.spec import Activation
from moefx.contract import Contract, Pad, Predicate
from moefx.kernels import contiguous, fp8, fp8_experts, fp8_fallback, masked, value_checks
from moefx.kernels.base import Kernel, Packed
from moefx.kernels.deep_gemm import library
from moefx.kernels.fp8_experts import packed_activation


def pack_fp8(w13: Any, b13: Any, w2: Any, b2: Any, activation: str) -> Packed:
    """e4m3 weights with power-of-two block scales, gate rows in front."""
    return fp8_experts.pack(w13, b13, w2, b2, activation, ue8m0=True)


def pack_bf16(w13: Any, b13: Any, w2: Any, b2: Any, activation: str) -> Packed:
    """Contiguous weights, gate rows in front: the library takes no slice of a larger tensor."""
    columns = Activation.decode(activation).columns
    if columns not in ("concat", "separate"):
        w13, b13 = fp8_experts.gate_first(w13, b13, activation)
    return w13.contiguous(), b13, w2.contiguous(), b2


def _fp8(name: str, x, ids, weights, q13, s13, b13, q2, s2, b2, activation, first=0):
    if ids.numel() == 0 or q13.shape[0] == 0:
        return x.new_zeros(x.shape[0], q2.shape[1])
    act, at = packed_activation(activation, x.dtype), _layout(name, ids, first, q13.shape[0])
    quantised, scales = fp8.quantize_groups(x, True)
    rows = at.scatter(quantised.view(torch.uint8)).view(fp8.E4M3)
    h = at.gemm((rows, at.scatter(scales)), (q13, s13), x.dtype)
    h = at.add(h, b13)
    quantised, scales = fp8.quantize_groups(act(h.float()).to(h.dtype), True)
    y = at.gemm((quantised, at.clear(scales)), (q2, s2), x.dtype)
    return at.combine(at.add(y, b2), weights).to(x.dtype)


def _bf16(name: str, x, ids, weights, w13, b13, w2, b2, activation, first=0):
    if ids.numel() == 0 or w13.shape[0] == 0:
        return x.new_zeros(x.shape[0], w2.shape[1])
    act, at = packed_activation(activation, x.dtype), _layout(name, ids, first, w13.shape[0])
    h = at.add(at.gemm(at.scatter(x), w13, x.dtype), b13)
    y = at.add(at.gemm(act(h), w2, x.dtype), b2)
    return at.combine(y, weights).to(x.dtype)


class _Masked:
    """[E, N, .] with N a multiple of 128: a partial tile would overwrite the next expert's rows."""

    def __init__(self, name: str, ids: torch.Tensor, first: int, experts: int) -> None:
        self.name, self.top_k = name, ids.shape[1]
        self.at = masked.layout(ids, first, experts)
        self.expected = max(1, -(-ids.numel() // experts))

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        return masked.scatter(x, self.at, self.top_k)

    def gemm(self, a: Any, b: Any, dtype: torch.dtype) -> torch.Tensor:
        rows, weight = (a[0], b[0]) if isinstance(a, tuple) else (a, b)
        if value_checks.ON:
            most = int(self.at.masked_m.max())
            value_checks.require(most <= rows.shape[1], "max(masked_m) <= N", f"{most} rows, N = {rows.shape[1]}")
        if rows.is_cuda:
            d = rows.new_zeros(rows.shape[0], rows.shape[1], weight.shape[1], dtype=dtype)
            return library.call(self.name, a, b, d, self.at.masked_m, self.expected)
        if isinstance(a, tuple):
            _check_scales(a[1], b[1])
            return masked.gemm(a[0], a[1], b[0], b[1], self.at.masked_m, dtype)
        d = torch.zeros(rows.shape[0], rows.shape[1], weight.shape[1], dtype=dtype)
        for e, m in enumerate(self.at.masked_m.tolist()):
            d[e, :m] = rows[e, :m] @ weight[e].t()
        return d

    def add(self, h: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return h if bias is None else h + bias.unsqueeze(1)

    def clear(self, scales: torch.Tensor) -> torch.Tensor:
        """Scales [E, N, G] with 0 past masked_m: the library reads them too."""
        return torch.where(self.at.valid(), scales, 0)

    def combine(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return masked.combine(y, weights, self.at)


class _Contiguous:
    """[M, .] with each expert's rows padded to the library's alignment, read here and checked again at the product."""

    def __init__(self, name: str, ids: torch.Tensor, first: int, experts: int) -> None:
        self.name, self.top_k = name, ids.shape[1]
        self.at = contiguous.layout(ids, first, experts, library.alignment())

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        return contiguous.scatter(x, self.at, self.top_k)

    def gemm(self, a: Any, b: Any, dtype: torch.dtype) -> torch.Tensor:
        rows, weight = (a[0], b[0]) if isinstance(a, tuple) else (a, b)
        contiguous.check(self.at, library.alignment())
        if rows.is_cuda and self.at.rows:
            d = rows.new_empty(rows.shape[0], weight.shape[1], dtype=dtype)
            return library.call(self.name, a, b, d, self.at.ids)
        d = rows.new_zeros(rows.shape[0], weight.shape[1], dtype=dtype)
        for e in range(weight.shape[0]):
            mine = self.at.ids == e
            if isinstance(a, tuple):
                _check_scales(a[1], b[1])
                product = fp8.dequantize_groups(a[0][mine], a[1][mine]) @ fp8.dequantize_blocks(b[0][e], b[1][e]).t()
            else:
                product = rows[mine] @ weight[e].t()
            d[mine] = product.to(dtype)
        return d

    def add(self, h: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return h if bias is None else h + bias[self.at.ids.clamp_min(0).long()]

    def clear(self, scales: torch.Tensor) -> torch.Tensor:
        return scales

    def combine(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return contiguous.combine(y, weights, self.at)


def _layout(name: str, ids: torch.Tensor, first: int, experts: int) -> _Masked | _Contiguous:
    return (_Masked if name.endswith("masked") else _Contiguous)(name, ids, first, experts)


def _check_scales(*scales: torch.Tensor) -> None:
    if value_checks.ON:
        exact = all(bool(((s.view(torch.int32) & 0x7FFFFF) == 0).all()) for s in scales)
        value_checks.require(exact, "scales are powers of two", "a scale has a mantissa")


def _reference_bf16(x, ids, weights, w13, b13, w2, b2, activation, first=0):
    return ops.experts(x, ids, weights, w13, b13, w2, b2, packed_activation(activation, x.dtype).encode(), first)


def _act_quant(h: torch.Tensor, act: Activation) -> tuple[torch.Tensor, torch.Tensor]:
    return fp8.quantize_groups(act(h.float()).to(h.dtype), True)


_COMMON = (
    Predicate("dtype == 'bfloat16'", "the library writes bf16"),
    Predicate("activation != 'opaque'", "an activation kept as it was stays outside any kernel"),
    Predicate("E >= 1", "the library asserts at least one group"),
    Predicate("D % 8 == 0", "rows of what the first product writes and the second reads, in units of 16 bytes"),
    Predicate("H % 8 == 0", "rows of what the first product reads and the second writes, in units of 16 bytes"),
)
_FP8 = (
    fp8_experts.QUANTISABLE,
    Predicate("H % 128 == 0", "scales cover 128 of the first product's inner size"),
    Predicate("D % 128 == 0", "scales cover 128 of the second product's inner size"),
)
_BF16 = (
    Predicate("target != 'sm90' or H % 64 == 0", "tiles of 64 of the inner size on SM90"),
    Predicate("target != 'sm90' or D % 64 == 0", "tiles of 64 of the inner size on SM90"),
    Predicate("weight_format == 'bfloat16'", "both operands are bf16"),
)
_MASKED = (Predicate("N % 128 == 0", "a partial tile overwrites the next expert's rows, and nothing asserts it"),)
_CHECKS = {
    "masked": ("max(masked_m) <= N",),
    "contiguous": ("group_start % alignment == 0",),
}


def _kernel(precision: str, layout: str) -> Kernel:
    fp8_kind = precision == "fp8"
    library_name = f"m_grouped_{precision}_gemm_nt_{layout}"
    name = f"deep_gemm_{precision}_{layout}"
    run: Callable[..., torch.Tensor] = _fp8 if fp8_kind else _bf16

    def op(*arguments: Any, **named: Any) -> torch.Tensor:
        return run(library_name, *arguments, **named)

    schema = (
        fp8_fallback.SCHEMA
        if fp8_kind
        else fp8_fallback.SCHEMA.replace("Tensor q13, Tensor s13", "Tensor q13").replace("Tensor q2, Tensor s2", "Tensor q2")
    )
    return Kernel(
        name=name,
        contract=Contract(
            name,
            predicates=(*_COMMON, *(_FP8 if fp8_kind else _BF16), *(_MASKED if layout == "masked" else ())),
            value_checks=(*_CHECKS[layout], *(("scales are powers of two",) if fp8_kind else ())),
            precisions=("fp8",) if fp8_kind else ("preserve",),
            targets=("sm90", "sm100"),
            pads=(Pad("D", 128), Pad("H", 128)) if fp8_kind else (Pad("D", 64), Pad("H", 64)),
        ),
        pack=pack_fp8 if fp8_kind else pack_bf16,
        op=ops.define(f"experts_{name}{schema}", op, lambda x, *_, **__: torch.empty_like(x)),
        reference=fp8_experts.reference(_act_quant, ue8m0=True) if fp8_kind else _reference_bf16,
        lossy=fp8_kind,
        weight_bytes=1 if fp8_kind else 2,
        row_bytes=14 if fp8_kind else 12,
    )


FP8 = tuple(_kernel("fp8", layout) for layout in ("masked", "contiguous"))
BF16 = tuple(_kernel("bf16", layout) for layout in ("contiguous", "masked"))
