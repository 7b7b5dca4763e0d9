"""What the FP8 kernels share: packing expert weights to 128x128 blocks, and their plain reference without any layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from moefx.activation.spec import Activation
from moefx.contract import Predicate
from moefx.kernels import fp8
from moefx.kernels.base import Packed

QUANTISABLE = Predicate(
    "weight_format in ('bfloat16', 'float16', 'float32', 'float64', 'float8_e4m3fn')", "weights of one element a matrix entry are quantised"
)


def pack(
    w13: torch.Tensor, b13: torch.Tensor | None, w2: torch.Tensor, b2: torch.Tensor | None, activation: str, ue8m0: bool = False
) -> Packed:
    """(q13, s13, b13, q2, s2, b2): e4m3 weights with block scales, gate rows in front of up rows."""
    w13, b13 = gate_first(w13, b13, activation)
    q13, s13 = fp8.quantize_blocks(w13, ue8m0)
    q2, s2 = fp8.quantize_blocks(w2, ue8m0)
    return q13, s13, b13, q2, s2, b2


def gate_first(w13: torch.Tensor, b13: torch.Tensor | None, activation: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows and bias of gate_up with the gate's in front, contiguous; ungated ones as they are."""
    act = Activation.decode(activation)
    if not act.gated:
        return w13, b13
    return torch.cat(_halves(w13, act.columns), 1), torch.cat(_halves(b13, act.columns), 1) if b13 is not None else None


def _halves(rows: torch.Tensor, columns: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up along dim 1."""
    if columns.startswith("interleaved"):
        first, second = rows[:, 0::2], rows[:, 1::2]
    else:
        first, second = rows.chunk(2, dim=1)
    return (second, first) if columns.endswith("up_first") else (first, second)


def packed_activation(activation: str, dtype: torch.dtype) -> Activation:
    """The activation on packed columns, its limit rounded to the type the clamp runs in."""
    act = Activation.decode(activation)
    limit = act.limit if act.limit is None else float(torch.tensor(act.limit, dtype=dtype))
    return replace(act, columns="concat", limit=limit)


def product_dtype(x: torch.Tensor) -> torch.dtype:
    """What the GEMMs write: the activations' own half type, else fp32."""
    return x.dtype if x.dtype in (torch.bfloat16, torch.float16) else torch.float32


def reference(act_quant: Callable[..., tuple[torch.Tensor, torch.Tensor]], ue8m0: bool = False) -> Callable[..., torch.Tensor]:
    """The experts op over packed weights, one (token, k) pair at a time's worth of rows: no sorting, no layout."""

    def run(x, ids, weights, q13, s13, b13, q2, s2, b2, activation, first=0):
        tokens, top_k = ids.shape
        act, dtype = packed_activation(activation, product_dtype(x)), product_dtype(x)
        out = torch.zeros(tokens, q2.shape[1])
        qx = fp8.dequantize_groups(*fp8.quantize_groups(x, ue8m0))
        for k in range(top_k):
            for e in range(q13.shape[0]):
                mine = ids[:, k] == e + first
                h = F.linear(qx[mine], fp8.dequantize_blocks(q13[e], s13[e])).to(dtype)
                h = h if b13 is None else h + b13[e]
                q, s = act_quant(h, act)
                y = F.linear(fp8.dequantize_groups(q, s), fp8.dequantize_blocks(q2[e], s2[e])).to(dtype)
                y = y if b2 is None else y + b2[e]
                out[mine] += y.float() * weights[mine, k, None].float()
        return out.to(x.dtype)

    return run
