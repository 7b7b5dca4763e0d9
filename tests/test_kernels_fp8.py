"""FP8 kernels: quantisation, layouts, the fused activation, experts end to end, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

from moefx import ops
from moefx.activation.spec import Activation
from moefx.kernels import fp8, fp8_experts, masked
from moefx.kernels.jit_ep.activation import act_quant, product
from moefx.kernels.registry import KERNELS, by_name

SWIGLU = Activation("swiglu")
ACTIVATIONS = [
    SWIGLU,
    Activation("swiglu", "concat_up_first", 0.5, "pre"),
    Activation("swiglu", "interleaved", 0.25, "post"),
    Activation("swiglu_oai", "interleaved", 0.7, "pre", 1.702, 1.0),
    Activation("geglu_tanh", "interleaved_up_first"),
    Activation("geglu"),
    Activation("relu2"),
    Activation("silu"),
]


def weights(
    act: Activation, experts: int = 4, hidden: int = 256, width: int = 512, bias: bool = False, dtype: torch.dtype = torch.float32
) -> list[Any]:
    columns = 2 * width if act.gated else width
    made = [torch.randn(experts, columns, hidden) * hidden**-0.5, torch.randn(experts, columns) * 0.1 if bias else None]
    made += [torch.randn(experts, hidden, width) * width**-0.5, torch.randn(experts, hidden) * 0.1 if bias else None]
    return [None if w is None else w.to(dtype) for w in made]


def exact(x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor, made: list[Any], act: Activation) -> torch.Tensor:
    double = [None if t is None else t.double() for t in made]
    return ops.experts(x.double(), ids, w.double(), *double, act.encode())


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def test_block_quantisation_follows_each_block() -> None:
    w = torch.randn(2, 200, 300)
    w[1, :128, :128] *= 1000
    q, s = fp8.quantize_blocks(w)
    assert (q.shape, s.shape) == ((2, 200, 300), (2, 2, 3))
    assert s[1, 0, 0] == pytest.approx(w[1, :128, :128].abs().max().item() / 448)
    assert s[0, 1, 2] == pytest.approx(w[0, 128:, 256:].abs().max().item() / 448)
    error = (fp8.dequantize_blocks(q, s) - w).abs()
    assert (error <= 2**-4 * w.abs() + s.repeat_interleave(128, 1)[:, :200].repeat_interleave(128, 2)[:, :, :300] * 2**-9).all()


def test_group_quantisation_and_floor() -> None:
    x = torch.randn(5, 300)
    x[2] = 0
    q, s = fp8.quantize_groups(x)
    assert s.shape == (5, 3)
    assert torch.equal(s[2], torch.full((3,), 1e-10) / 448)
    assert (q[2].float() == 0).all()
    assert s[0, 2] == pytest.approx(x[0, 256:].abs().max().item() / 448)


@pytest.mark.parametrize(("scale", "rounded"), [(1.0, 1.0), (1.0001, 2.0), (0.75, 1.0), (2**-20, 2**-20), (3.1e-8, 2**-24)])
def test_ue8m0_rounds_up(scale: float, rounded: float) -> None:
    assert fp8.round_up_to_power_of_two(torch.tensor([scale])).item() == rounded


def test_ue8m0_packing() -> None:
    scales = 2.0 ** torch.randint(-20, 20, (3, 8, 8)).float()
    packed = fp8.pack_ue8m0(scales)
    assert (packed.shape, packed.dtype, packed.stride()) == ((3, 8, 2), torch.int32, (16, 1, 8))
    assert torch.equal(fp8.unpack_ue8m0(packed), scales)
    first = packed[0, 0, 0].item() & 0xFF
    assert 2.0 ** (first - 127) == scales[0, 0, 0]


def test_masked_layout_round_trip_and_value_check() -> None:
    ids = torch.rand(37, 8).topk(2).indices
    at = masked.layout(ids, 2, 3)
    assert at.rows == 128
    assert at.masked_m.tolist() == [(ids == e).sum().item() for e in (2, 3, 4)]
    assert at.masked_m.sum() <= at.rows * ids.shape[1]
    x, w = torch.randn(37, 16), torch.rand(37, 2)
    y = masked.combine(masked.scatter(x, at, 2), w, at)
    local = ((ids >= 2) & (ids < 5)).float()
    torch.testing.assert_close(y, x * (w * local).sum(1, keepdim=True))


def test_gemm_leaves_rows_past_masked_m_at_zero() -> None:
    a, sa = fp8.quantize_groups(torch.randn(2, 128, 256))
    w, sw = fp8.quantize_blocks(torch.randn(2, 64, 256))
    y = masked.gemm(a, sa, w, sw, torch.tensor([5, 0], dtype=torch.int32), torch.float32)
    assert (y[0, 5:] == 0).all() and (y[1] == 0).all()
    torch.testing.assert_close(y[0, :5], fp8.dequantize_groups(a, sa)[0, :5] @ fp8.dequantize_blocks(w, sw)[0].t())


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("limit", [None, 0.5])
def test_jit_ep_act_quant(limit: float | None, ue8m0: bool) -> None:
    """Against the formula in float64: e4m3 has 3 mantissa bits, so a value is off by at most 2^-4 of itself (plus the smallest step)."""
    h = (torch.randn(3, 16, 1024) * 2).to(torch.bfloat16)
    masked_m = torch.tensor([16, 0, 5], dtype=torch.int32)
    q, s = act_quant(h, masked_m, limit, ue8m0)
    scales = fp8.unpack_ue8m0(s) if ue8m0 else s
    g, u = h.double().chunk(2, -1)
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    want = F.silu(g) * u
    amax = want.abs().unflatten(-1, (4, 128)).amax(-1) / 448
    for e, m in enumerate(masked_m.tolist()):
        torch.testing.assert_close(
            fp8.dequantize_groups(q, scales)[e, :m].double(), want[e, :m], rtol=2**-4, atol=amax.max().item() * 2**-8
        )
        ratio = scales[e, :m].double() / amax[e, :m]
        assert ((ratio >= 1 - 1e-6) & (ratio < (2 if ue8m0 else 1 + 1e-6))).all()
        assert (q[e, m:].float() == 0).all()
    opcheck(act_quant, (h, masked_m, limit, ue8m0))


def test_the_clamp_is_in_bf16_before_the_activation() -> None:
    h = torch.tensor([[3.0, -3.0]], dtype=torch.bfloat16)
    assert product(h, 0.3).item() == pytest.approx(
        -F.silu(torch.tensor(0.3).bfloat16().float()).item() * torch.tensor(0.3).bfloat16().item()
    )


@pytest.mark.parametrize(
    ("name", "act"),
    [("fp8_fallback", a) for a in ACTIVATIONS] + [("jit_ep", a) for a in ACTIVATIONS if a.kind == "swiglu" and a.clamp != "post"],
    ids=lambda a: a if isinstance(a, str) else f"{a.kind}-{a.columns}-{a.clamp}",
)
def test_experts_against_float64(name: str, act: Activation) -> None:
    """Mean error of an FP8 layer: about 5% of the output's size; a formula without clamp, bias or order is far off."""
    kernel = by_name(name)
    bias = name == "fp8_fallback"
    made = weights(act, bias=bias, dtype=torch.bfloat16)
    x, ids, w = torch.randn(40, 256).bfloat16(), torch.rand(40, 4).topk(2).indices, torch.rand(40, 2)
    got = kernel.op(x, ids, w, *kernel.pack(*made, act.encode()), act.encode(), 0).double()
    want = exact(x, ids, w, made, act)
    error = (got - want).abs().mean() / want.abs().mean()
    assert error < 0.08
    reference = kernel.reference(x, ids, w, *kernel.pack(*made, act.encode()), act.encode(), 0).double()
    assert (got - reference).abs().mean() / want.abs().mean() < 0.005
    wrong = Activation("swiglu", "concat") if act != SWIGLU else Activation("swiglu", "concat_up_first")
    if act.gated:
        off = exact(x, ids, w, made, wrong)
        assert (got - off).abs().mean() / want.abs().mean() > 0.15


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_ranks_add_up(kernel: Any) -> None:
    made = weights(SWIGLU, dtype=torch.bfloat16)
    x, ids, w = torch.randn(9, 256).bfloat16(), torch.rand(9, 4).topk(2).indices, torch.rand(9, 2)
    whole = kernel.op(x, ids, w, *kernel.pack(*made, SWIGLU.encode()), SWIGLU.encode(), 0).float()
    parts = torch.zeros_like(whole)
    for first in (0, 2):
        rank = [None if t is None else t[first : first + 2] for t in made]
        parts += kernel.op(x, ids, w, *kernel.pack(*rank, SWIGLU.encode()), SWIGLU.encode(), first).float()
    torch.testing.assert_close(parts, whole, atol=2e-2, rtol=2e-2)
    assert whole.abs().max() > 0.3


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_ops(kernel: Any, tokens: int) -> None:
    made = weights(SWIGLU, dtype=torch.bfloat16)
    x, ids, w = torch.randn(tokens, 256).bfloat16(), torch.rand(tokens, 4).topk(2).indices, torch.rand(tokens, 2)
    arguments = (x, ids, w, *kernel.pack(*made, SWIGLU.encode()), SWIGLU.encode(), 0)
    assert kernel.op(*arguments).shape == (tokens, 256)
    checks = ["test_faketensor", "test_aot_dispatch_dynamic", "test_autograd_registration"]
    if not kernel.lossy:  # the schema check copies and compares every input, which torch can't do in e4m3 on a CPU
        checks.append("test_schema")
    opcheck(kernel.op, arguments, test_utils=checks)


def test_pack_orders_gate_before_up() -> None:
    act = Activation("swiglu", "interleaved_up_first")
    w13 = torch.randn(2, 256, 128)
    q, s, *_ = fp8_experts.pack(w13, None, torch.randn(2, 128, 128), None, act.encode())
    back = fp8.dequantize_blocks(q, s)
    torch.testing.assert_close(back[:, :128], w13[:, 1::2], atol=0.15, rtol=0.07)
    torch.testing.assert_close(back[:, 128:], w13[:, 0::2], atol=0.15, rtol=0.07)


@pytest.mark.parametrize("name", ["fp8_fallback", "jit_ep", "deep_gemm_fp8_masked", "deep_gemm_bf16_masked"])
@pytest.mark.parametrize("experts", [1, 3])
def test_tokens_that_name_an_expert_twice_overflow_no_block(name: str, experts: int) -> None:
    torch.manual_seed(0)
    kernel = by_name(name)
    w13, w2 = torch.randn(experts, 1024, 128).bfloat16() * 0.09, torch.randn(experts, 128, 512).bfloat16() * 0.05
    x, ids = torch.randn(130, 128).bfloat16(), torch.zeros(130, 2, dtype=torch.int64)
    weights, act = torch.rand(130, 2), Activation("swiglu").encode()
    packed = kernel.pack(w13, None, w2, None, act)
    got, want = kernel.op(x, ids, weights, *packed, act).float(), kernel.reference(x, ids, weights, *packed, act).float()
    assert (got - want).abs().max() < 0.02 * want.abs().max()
