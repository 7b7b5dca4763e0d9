"""The default kernel against float64: every dtype, layout, activation; its precision against eager."""

from __future__ import annotations

import pytest
import torch
from test_kernels_fp8 import ACTIVATIONS, exact, weights
from torch.library import opcheck

from moefx import ops
from moefx.activation.spec import Activation
from moefx.kernels import grouped_mm

KERNEL = grouped_mm.KERNEL


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("tokens", [0, 1, 7, 300])
@pytest.mark.parametrize("act", ACTIVATIONS, ids=lambda a: f"{a.kind}-{a.columns}-{a.clamp}")
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)]
)
def test_against_float64(act: Activation, tokens: int, dtype: torch.dtype, tolerance: float) -> None:
    made = weights(act, experts=5, hidden=64, width=48, bias=True, dtype=dtype)
    x, ids, w = torch.randn(tokens, 64).to(dtype), torch.rand(tokens, 5).topk(2).indices, torch.rand(tokens, 2).to(dtype)
    got = KERNEL.op(x, ids, w, *made, act.encode(), 0)
    want = exact(x, ids, w, made, act)
    assert got.dtype == dtype
    assert tokens == 0 or ((got.double() - want).abs().max() / want.abs().max()).item() < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transposed_and_odd_weights(dtype: torch.dtype) -> None:
    """Transposed views are taken as they are; sizes that torch's grouped GEMM refuses take the loop."""
    act = Activation("swiglu")
    w13, w2 = torch.randn(4, 64, 2 * 33).to(dtype).transpose(1, 2), torch.randn(4, 33, 64).to(dtype).transpose(1, 2)
    x, ids, w = torch.randn(9, 64).to(dtype), torch.rand(9, 4).topk(2).indices, torch.rand(9, 2).to(dtype)
    got, want = KERNEL.op(x, ids, w, w13, None, w2, None, act.encode(), 0), exact(x, ids, w, [w13, None, w2, None], act)
    assert ((got.double() - want).abs().max() / want.abs().max()).item() < (1e-5 if dtype == torch.float32 else 3e-2)


def test_nan_and_inf_stay_with_their_token() -> None:
    made = weights(Activation("swiglu"), hidden=64, width=48)
    x, ids, w = torch.randn(6, 64), torch.rand(6, 4).topk(2).indices, torch.rand(6, 2)
    x[2, 3], x[4, 0] = float("nan"), float("inf")
    got = KERNEL.op(x, ids, w, *made, Activation("swiglu").encode(), 0)
    assert got[2].isnan().all() and not got[4].isfinite().all()
    assert got[[0, 1, 3, 5]].isfinite().all()


def test_foreign_experts_add_nothing() -> None:
    """Undefined rows of a grouped GEMM never reach the result, whatever they hold."""
    made = weights(Activation("swiglu"), hidden=64, width=48, dtype=torch.bfloat16)
    x, ids = torch.randn(6, 64).bfloat16(), torch.full((6, 2), 7)
    assert (KERNEL.op(x, ids, torch.rand(6, 2), *made, Activation("swiglu").encode(), 0) == 0).all()


def test_canonical_ops() -> None:
    made = weights(Activation("swiglu"), hidden=64, width=48, bias=True)
    x, ids, w = torch.randn(6, 64), torch.rand(6, 4).topk(2).indices, torch.rand(6, 2)
    opcheck(ops.experts, (x, ids, w, *made, Activation("swiglu").encode(), 0))
    opcheck(ops.expert_linear, (x, ids[:, 0], made[0], made[1], 0))
    opcheck(ops.shared_expert, (x, torch.rand(6, 1), made[0][0], made[1][0], made[2][0], made[3][0], Activation("swiglu").encode()))
    opcheck(ops.grouped_mm, (x, made[0].transpose(1, 2), torch.tensor([1, 3, 3, 6], dtype=torch.int32)))


def test_reference_meaning() -> None:
    """The canonical op, written out for one token."""
    act = Activation("swiglu")
    w13, b13, w2, b2 = weights(act, hidden=64, width=48, bias=True, dtype=torch.float64)
    x = torch.randn(1, 64, dtype=torch.float64)
    ids, w = torch.tensor([[3, 1]]), torch.tensor([[0.3, 0.7]], dtype=torch.float64)
    want = torch.zeros(64, dtype=torch.float64)
    for k in (0, 1):
        e = int(ids[0, k])
        h = w13[e] @ x[0] + b13[e]
        g, u = h[:48], h[48:]
        want += w[0, k] * (w2[e] @ (g / (1 + torch.exp(-g)) * u) + b2[e])
    torch.testing.assert_close(ops.experts(x, ids, w, w13, b13, w2, b2, act.encode(), 0)[0], want)
