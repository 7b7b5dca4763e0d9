"""The C++ kernel of routed experts on a CPU: one call a layer, weights packed in panels. Its four storages of weights are four kernels.

`cpu_packed` keeps the model's precision (bf16, fp16, fp32): fp32 sums, the activation on them, h rounded to x's type, fp32 combine.
`cpu_fp8` has e4m3 weights in 128x128 blocks and activations quantised in groups of 128; `cpu_fp8_weight_only` leaves activations as they
are; `cpu_int8` has a scale for each output column and for each row of activations.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moefx import ops
from moefx.activation.spec import Activation
from moefx.contract import Contract, Predicate
from moefx.kernels import fp8
from moefx.kernels.base import Kernel, Packed
from moefx.kernels.cpu import panels
from moefx.kernels.cpu.panels import FP8, INT8, OWN


def _until_loaded(name: str):
    """The implementation of an op until the library is there, which then has its own for a CPU."""

    def run(x, *rest, **named):
        if x.device.type != "cpu":
            raise NotImplementedError(f"moefx::{name} runs on a CPU, x is on {x.device}")
        panels.loaded()
        return getattr(torch.ops.moefx, name).default(x, *rest, **named)

    return run


def _define(name: str, weights: str):
    schema = f"{name}(Tensor x, Tensor ids, Tensor weights, {weights}, str activation, int first=0) -> Tensor"
    return ops.define(schema, _until_loaded(name), _fake)


def _fake(x, *rest, **named):
    del rest, named
    return torch.empty_like(x)


def _pack(w13, b13, w2, b2, activation) -> Packed:
    """(w13, b13, w2, b2) in panels, in their own type."""
    gated = Activation.decode(activation).gated
    (p13,) = panels.pack(w13, OWN, gated, activation)
    (p2,) = panels.pack(w2, OWN, False, activation)
    return p13, panels.pack_bias(b13, gated, activation), p2, panels.pack_bias(b2, False, activation)


def unpack(packed: Packed, hidden: int, width: int, activation: str) -> Packed:
    """(w13, b13, w2, b2) that `cpu_packed` was packed from, bit for bit."""
    p13, b13, p2, b2 = packed
    assert p13 is not None and p2 is not None
    gated, experts = Activation.decode(activation).gated, p13.shape[0]
    columns = 2 * width if gated else width
    return (
        panels.unpack(p13, (experts, columns, hidden), gated, activation),
        panels.unpack_bias(b13, columns, gated, activation, p13.dtype),
        panels.unpack(p2, (experts, hidden, width), False, activation),
        panels.unpack_bias(b2, hidden, False, activation, p2.dtype),
    )


def _pack_fp8(w13, b13, w2, b2, activation) -> Packed:
    """(w13, scales, b13, w2, scales, b2) in panels of e4m3."""
    return _pack_quantised(FP8, w13, b13, w2, b2, activation)


def _pack_int8(w13, b13, w2, b2, activation) -> Packed:
    """(w13, scales, corrections, b13, w2, scales, corrections, b2) in panels of int8."""
    return _pack_quantised(INT8, w13, b13, w2, b2, activation)


def _pack_quantised(storage: int, w13, b13, w2, b2, activation) -> Packed:
    gated = Activation.decode(activation).gated
    first, second = panels.pack(w13, storage, gated, activation), panels.pack(w2, storage, False, activation)
    return *first, panels.pack_bias(b13, gated, activation), *second, panels.pack_bias(b2, False, activation)


def _plain_reference(x, ids, weights, w13, b13, w2, b2, activation, first=0):
    """The experts op on the matrices the panels hold."""
    act = panels_activation(activation)
    gated, hidden = act.gated, x.shape[1]
    m13, m2 = panels.plain(w13)[..., :hidden], panels.plain(w2)[:, :hidden]
    m13 = panels.halves(m13) if gated else m13
    width = m13.shape[1] // 2 if gated else m13.shape[1]
    m2 = F.pad(m2, (0, width - m2.shape[2]))
    b13 = b13 if b13 is None else (panels.halves(b13) if gated else b13).to(x.dtype)
    return ops.experts(x, ids, weights, m13, b13, m2, None if b2 is None else b2[:, :hidden].to(x.dtype), act.encode(), first)


def panels_activation(activation: str) -> Activation:
    """The activation on columns as panels hold them once gate and up are apart."""
    act = Activation.decode(activation)
    return Activation(act.kind, "concat", act.limit, act.clamp, act.alpha, act.beta)


def _quantised_reference(quantise, dequantised):
    """The experts op in fp32 with the same quantisation: `quantise(x)` -> x as it is seen, `dequantised(w, *scales)` -> [E, N, K]."""

    def run(x, ids, weights, *packed):
        activation, first = (packed[-2], packed[-1]) if isinstance(packed[-2], str) else (packed[-1], 0)
        tensors = packed[: packed.index(activation)]
        each = len(tensors) // 2
        (w13, *s13, b13), (w2, *s2, b2) = tensors[:each], tensors[each:]
        act = panels_activation(activation)
        m13, m2 = dequantised(w13, *s13), dequantised(w2, *s2)
        m13, b13 = (panels.halves(m13), b13 if b13 is None else panels.halves(b13)) if act.gated else (m13, b13)
        hidden, inner = x.shape[1], m2.shape[2]
        out = torch.zeros(x.shape)
        seen = F.pad(quantise(x.float()), (0, m13.shape[2] - hidden))
        for k in range(ids.shape[1]):
            for e in range(m13.shape[0]):
                mine = ids[:, k] == e + first
                h = act(F.linear(seen[mine], m13[e], None if b13 is None else b13[e]))
                h = F.pad(h, (0, max(0, inner - h.shape[1])))[:, :inner]
                y = F.linear(quantise(h), m2[e], None if b2 is None else b2[e])
                out[mine] += y[:, :hidden] * weights[mine, k, None].float()
        return out.to(x.dtype)

    return run


def _as_groups(x: torch.Tensor) -> torch.Tensor:
    return fp8.dequantize_groups(*fp8.quantize_groups(x))


def _as_bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def _as_int8(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True).clamp_min(fp8.AMAX_FLOOR) / 127
    return (x / scale).round().clamp(-127, 127) * scale


def _from_blocks(w: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    matrix = panels.plain(w).float()
    wide = scales.transpose(2, 3).flatten(1, 2).repeat_interleave(panels.PANEL // 2, 1).repeat_interleave(panels.GROUP, 2)
    return matrix * wide[..., : matrix.shape[2]]


def _from_columns(w: torch.Tensor, scales: torch.Tensor, corrections: torch.Tensor) -> torch.Tensor:
    del corrections
    return panels.plain(w).float() * scales.unsqueeze(-1)


_BUILT = Predicate("isa in ('avx512_bf16', 'avx512', 'avx2')", "a C++ compiler, and an instruction set the kernel is written for")
_NAMED = Predicate("activation != 'opaque'", "an activation kept as it was stays outside any kernel")
_BLOCKS = "Tensor w13, Tensor s13, Tensor? b13, Tensor w2, Tensor s2, Tensor? b2"

PACKED = Kernel(
    name="cpu_packed",
    contract=Contract(
        "cpu_packed",
        predicates=(
            _BUILT,
            _NAMED,
            Predicate("weight_format in ('bfloat16', 'float16', 'float32')", "the types its inner loops are written for"),
            Predicate("dtype == weight_format", "rows and weights are multiplied in one type"),
        ),
        precisions=("preserve", "fp8", "fp8_weight_only", "int8"),
    ),
    pack=_pack,
    unpack=unpack,
    op=_define("experts_cpu_packed", "Tensor w13, Tensor? b13, Tensor w2, Tensor? b2"),
    reference=_plain_reference,
    packs=True,
    joins=True,
)

FP8_BLOCKS = Kernel(
    name="cpu_fp8",
    contract=Contract("cpu_fp8", predicates=(_BUILT, _NAMED), precisions=("fp8",)),
    pack=_pack_fp8,
    op=_define("experts_cpu_fp8", _BLOCKS),
    reference=_quantised_reference(_as_groups, _from_blocks),
    lossy=True,
    packs=True,
    joins=True,
)

FP8_WEIGHTS = Kernel(
    name="cpu_fp8_weight_only",
    contract=Contract(
        "cpu_fp8_weight_only",
        predicates=(_BUILT, _NAMED, Predicate("dtype == 'bfloat16'", "activations are multiplied as bf16")),
        precisions=("fp8_weight_only",),
    ),
    pack=_pack_fp8,
    op=_define("experts_cpu_fp8_weight_only", _BLOCKS),
    reference=_quantised_reference(_as_bf16, _from_blocks),
    lossy=True,
    packs=True,
    joins=True,
)

INT8_COLUMNS = Kernel(
    name="cpu_int8",
    contract=Contract(
        "cpu_int8",
        predicates=(
            Predicate("isa == 'avx512_bf16'", "int8 dot products (VNNI) of the newest instruction set the kernel is written for"),
            _NAMED,
            Predicate("H <= 65536 and D <= 65536", "int32 sums hold so many products of a byte and an int8"),
        ),
        precisions=("int8",),
    ),
    pack=_pack_int8,
    op=_define("experts_cpu_int8", "Tensor w13, Tensor s13, Tensor c13, Tensor? b13, Tensor w2, Tensor s2, Tensor c2, Tensor? b2"),
    reference=_quantised_reference(_as_int8, _from_columns),
    lossy=True,
    packs=True,
    joins=True,
)

KERNELS = (FP8_BLOCKS, FP8_WEIGHTS, INT8_COLUMNS, PACKED)
