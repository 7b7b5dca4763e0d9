"""The quantised storages of the CPU kernel: against their plain references and float64."""

from __future__ import annotations

import pytest
import torch
from test_kernels_fp8 import ACTIVATIONS, SWIGLU, exact, weights
from torch.library import opcheck

from moefx.activation.spec import Activation
from moefx.kernels import fp8, fp8_fallback
from moefx.kernels.cpu import build, kernel, panels

BUILT = [i for i in build.INSTRUCTIONS if build.library("experts", i) is not None]
KERNELS = (kernel.FP8_BLOCKS, kernel.FP8_WEIGHTS, kernel.INT8_COLUMNS)
EXACT = {"cpu_fp8": 0.1, "cpu_fp8_weight_only": 0.08, "cpu_int8": 0.03}  # mean error against float64 and unquantised weights, of the mean
pytestmark = pytest.mark.skipif(not BUILT, reason=f"not built here: {build.why_not('experts')}")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=[(k, i) for k in KERNELS for i in BUILT if k is not kernel.INT8_COLUMNS or i == "avx512_bf16"],
                ids=lambda p: f"{p[0].name}-{p[1]}")  # fmt: skip
def quantised(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build, "isa", lambda name="experts": request.param[1])
    return request.param[0]


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).abs().mean() / want.double().abs().mean()).item()


@pytest.mark.parametrize("act", ACTIVATIONS, ids=lambda a: f"{a.kind}-{a.columns}-{a.clamp}")
@pytest.mark.parametrize(("hidden", "width"), [(256, 128), (200, 70), (321, 161)])
def test_against_reference_and_float64(quantised, act: Activation, hidden: int, width: int) -> None:
    for tokens, bias in [(1, True), (6, False), (90, True)]:
        made = weights(act, 4, hidden, width, bias, torch.bfloat16)
        x, ids, w = torch.randn(tokens, hidden).bfloat16(), torch.rand(tokens, 4).topk(2).indices, torch.rand(tokens, 2)
        packed = quantised.pack(*made, act.encode())
        got = quantised.op(x, ids, w, *packed, act.encode(), 0)
        assert relative(got, quantised.reference(x, ids, w, *packed, act.encode(), 0)) < 5e-3
        assert relative(got, exact(x, ids, w, made, act)) < EXACT[quantised.name]


def test_fp8_agrees_with_the_other_fp8_kernels() -> None:
    """The same blocks, scales and groups where sizes are whole blocks; in fp32, since those kernels round products to a half type."""
    made = weights(SWIGLU, 4, 256, 128, True)
    x, ids, w = torch.randn(50, 256), torch.rand(50, 4).topk(2).indices, torch.rand(50, 2)
    text, other = SWIGLU.encode(), fp8_fallback.KERNEL
    got = kernel.FP8_BLOCKS.op(x, ids, w, *kernel.FP8_BLOCKS.pack(*made, text), text, 0)
    assert relative(got, other.reference(x, ids, w, *other.pack(*made, text), text, 0)) < 1e-3


def test_packed_codes_are_those_of_torch() -> None:
    w = torch.randn(2, 300, 333) * torch.logspace(-4, 2, 300)[:, None]
    codes, scales = panels.pack(w, panels.FP8, False, SWIGLU.encode())
    want, want_scales = fp8.quantize_blocks(w)
    assert torch.equal(panels.plain(codes)[:, :300, :333].float(), want.float())
    assert torch.equal(scales.transpose(2, 3).flatten(1, 2)[:, ::4][:, : want_scales.shape[1]], want_scales)
    packed, scales, corrections = panels.pack(w, panels.INT8, False, SWIGLU.encode())
    plain = panels.plain(packed)[:, :300, :333]
    assert torch.equal(scales[:, :300], w.abs().amax(-1) / 127)
    assert torch.equal(plain.float(), (w / scales[:, :300, None]).round())
    assert torch.equal(corrections[:, :300], plain.int().sum(-1, dtype=torch.int32) * 128)


def test_nan_stays_in_its_row(quantised) -> None:
    made = weights(SWIGLU, 4, 256, 128, False, torch.bfloat16)
    x, ids, w = torch.randn(6, 256).bfloat16(), torch.rand(6, 4).topk(2).indices, torch.rand(6, 2)
    x[2, 5] = float("nan")
    x[4] = 0
    packed = quantised.pack(*made, SWIGLU.encode())
    got = quantised.op(x, ids, w, *packed, SWIGLU.encode(), 0)
    assert got[2].isnan().all() and got[[0, 1, 3, 4, 5]].isfinite().all()
    assert (got[4] == 0).all()


def test_threads_and_op(quantised) -> None:
    made = weights(SWIGLU, 4, 256, 128, True, torch.bfloat16)
    x, ids, w = torch.randn(70, 256).bfloat16(), torch.randint(-1, 5, (70, 2)), torch.rand(70, 2)
    packed = quantised.pack(*made, SWIGLU.encode())
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(quantised.op(x, ids, w, *packed, SWIGLU.encode(), 0))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(r, results[0]) for r in results)
    opcheck(quantised.op, (x, ids, w, *packed, SWIGLU.encode(), 0))


@pytest.mark.parametrize("packing", [kernel.PACKED, *KERNELS], ids=lambda k: k.name)
def test_a_list_packs_as_what_it_is_joined_to(packing) -> None:
    w13, b13, w2, b2 = weights(SWIGLU, 5, 200, 70, True, torch.bfloat16)
    parts = [list(t.split((2, 1, 2))) for t in (w13.transpose(1, 2).contiguous().transpose(1, 2), b13, w2, b2)]
    got, want = packing.pack(*parts, SWIGLU.encode()), packing.pack(w13, b13, w2, b2, SWIGLU.encode())
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
