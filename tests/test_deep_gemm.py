"""DeepGEMM: every rule of its grouped GEMMs as a predicate or a value check, the layouts' numbers, and calls into builds that differ."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from moefx import ops
from moefx.activation.spec import Activation
from moefx.errors import ValueCheckError
from moefx.kernels import contiguous, fp8, value_checks
from moefx.kernels.deep_gemm import kernel as deep_gemm
from moefx.kernels.deep_gemm import library
from moefx.kernels.registry import by_name
from moefx.prove import Derived, Range

NAMES = [f"deep_gemm_{p}_{layout}" for p in ("fp8", "bf16") for layout in ("masked", "contiguous")]
FITS: dict[str, Any] = {
    "T": Range(0),
    "N": Derived("max(128, align(T, 128))"),
    "H": 2048,
    "D": 512,
    "E": 64,
    "dtype": "bfloat16",
    "weight_format": "bfloat16",
    "activation": "swiglu",
    "target": "sm90",
}


@pytest.mark.parametrize("name", NAMES)
def test_proved_for_any_number_of_tokens(name: str) -> None:
    assert by_name(name).contract.evaluate(FITS).status == "proved"


@pytest.mark.parametrize(
    ("name", "change", "failing"),
    [
        ("deep_gemm_fp8_masked", {"N": Derived("align(T, 64)")}, "N % 128 == 0"),
        ("deep_gemm_bf16_masked", {"N": 192}, "N % 128 == 0"),
        ("deep_gemm_fp8_masked", {"H": 2880}, "H % 128 == 0"),
        ("deep_gemm_fp8_contiguous", {"D": 320}, "D % 128 == 0"),
        ("deep_gemm_bf16_contiguous", {"H": 2080}, "target != 'sm90' or H % 64 == 0"),
        ("deep_gemm_bf16_masked", {"D": 96}, "target != 'sm90' or D % 64 == 0"),
        ("deep_gemm_bf16_contiguous", {"target": "sm100", "H": 2084}, "H % 8 == 0"),
        ("deep_gemm_bf16_contiguous", {"target": "sm100", "D": 510}, "D % 8 == 0"),
        ("deep_gemm_bf16_masked", {"weight_format": "float16"}, "weight_format == 'bfloat16'"),
        ("deep_gemm_fp8_masked", {"dtype": "float32"}, "dtype == 'bfloat16'"),
        ("deep_gemm_fp8_masked", {"activation": "opaque"}, "activation != 'opaque'"),
        ("deep_gemm_fp8_contiguous", {"E": 0}, "E >= 1"),
    ],
)
def test_each_rule_refuses(name: str, change: dict[str, Any], failing: str) -> None:
    outcome = by_name(name).contract.evaluate({**FITS, **change})
    assert [p.text for p in outcome.predicates if p.status == "refuted"] == [failing]


def test_sm100_in_bf16_takes_what_sm90_does_not() -> None:
    assert by_name("deep_gemm_bf16_masked").contract.evaluate({**FITS, "H": 2080, "target": "sm100"}).status == "proved"


def _case(columns: str = "concat", bias: bool = False, tokens: int = 37) -> tuple[Any, ...]:
    torch.manual_seed(0)
    e, h, d, k = 5, 128, 128, 3
    x = torch.randn(tokens, h, dtype=torch.bfloat16)
    ids = torch.rand(tokens, e).topk(k).indices
    ids[:, 2] = torch.where(torch.arange(tokens) % 4 == 0, -1, ids[:, 2])
    weights = torch.rand(tokens, k)
    w13, w2 = torch.randn(e, 2 * d, h) * h**-0.5, torch.randn(e, h, d) * d**-0.5
    b13, b2 = (torch.randn(e, 2 * d), torch.randn(e, h)) if bias else (None, None)
    half = [None if t is None else t.bfloat16() for t in (w13, b13, w2, b2)]
    return x, ids, weights, *half, Activation("swiglu", columns).encode()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("columns", "bias"), [("concat", False), ("interleaved", True)])
def test_the_layouts_compute_the_experts(name: str, columns: str, bias: bool) -> None:
    kernel = by_name(name)
    x, ids, weights, *dense, activation = _case(columns, bias)
    packed = kernel.pack(*dense, activation)
    got = kernel.op(x, ids, weights, *packed, activation).float()
    want = kernel.reference(x, ids, weights, *packed, activation).float()
    torch.testing.assert_close(got, want, atol=0.03, rtol=0.02)
    wide = [None if t is None else t.double() for t in dense]
    exact = ops.experts(x.double(), ids, weights.double(), *wide, activation)
    assert (got - exact).abs().mean() / exact.abs().mean() < (0.08 if kernel.lossy else 0.006)
    assert kernel.op(x[:0], ids[:0], weights[:0], *packed, activation).shape == (0, x.shape[1])
    assert kernel.op(x, ids.fill_(-1), weights, *packed, activation).abs().max() == 0


def test_fp8_scales_are_powers_of_two_and_the_data_is_quantised_with_them() -> None:
    weight = torch.randn(3, 130, 200)
    q, s = fp8.quantize_blocks(weight, ue8m0=True)
    assert torch.equal(torch.exp2(torch.log2(s).round()), s)
    error = (fp8.dequantize_blocks(q, s) - weight).abs() / weight.abs().amax()
    assert error.max() < 0.04


def test_contiguous_layout_starts_every_group_at_the_alignment() -> None:
    ids = torch.tensor([[0, 2], [2, 4], [2, 0]])
    at = contiguous.layout(ids, 0, 5, 8)
    assert at.ids.dtype == torch.int32 and at.ids.tolist() == [0, 0, *[-1] * 6, 2, 2, 2, *[-1] * 5, 4, *[-1] * 7]
    assert at.row.tolist() == [0, 1, 8, 9, 10, 16] and at.pair.tolist() == [0, 5, 1, 2, 4, 3]


def test_value_checks_cost_nothing_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    at = contiguous.layout(torch.tensor([[0, 1]]), 0, 2, 8)
    contiguous.check(at, 128)
    monkeypatch.setattr(value_checks, "ON", True)
    with pytest.raises(ValueCheckError, match="group_start % 128 == 0 fails"):
        contiguous.check(at, 128)
    contiguous.check(at, 8)


@pytest.mark.parametrize("name", ["jit_ep", *NAMES])
def test_value_checks_hold_for_the_layouts_made_here(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(value_checks, "ON", True)
    kernel = by_name(name)
    x, ids, weights, *dense, activation = _case()
    kernel.op(x, ids, weights, *kernel.pack(*dense, activation), activation)
    if "fp8" in name:
        q13, s13, *rest = kernel.pack(*dense, activation)
        with pytest.raises(ValueCheckError, match="powers of two"):
            kernel.op(x, ids, weights, q13, s13 * 1.5, *rest, activation)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    """Puts a module in the place of deep_gemm."""

    def put(module: Any) -> None:
        monkeypatch.setitem(sys.modules, "deep_gemm", module)
        library.load.cache_clear()

    yield put
    library.load.cache_clear()


def test_calls_are_by_the_names_the_build_has(installed: Any) -> None:
    seen: list[dict[str, Any]] = []

    def masked(a, b, d, masked_m, expected_m, compiled_dims="nk"):
        seen.append({"expected_m": expected_m, "compiled_dims": compiled_dims})
        d.fill_(7)

    module = types.ModuleType("deep_gemm")
    module.m_grouped_fp8_gemm_nt_masked = masked  # type: ignore[attr-defined]
    module.m_grouped_bf16_gemm_nt_contiguous = masked  # type: ignore[attr-defined]
    module.get_mk_alignment_for_contiguous_layout = lambda: 64  # type: ignore[attr-defined]
    installed(module)
    assert library.alignment() == 64
    out = library.call("m_grouped_fp8_gemm_nt_masked", 1, 2, torch.zeros(2), 3, 4, disable_ue8m0_cast=True, compiled_dims="mk")
    assert seen == [{"expected_m": 4, "compiled_dims": "mk"}] and out.tolist() == [7, 7]
    with pytest.raises(RuntimeError, match="has no m_grouped_bf16_gemm_nt_masked"):
        library.call("m_grouped_bf16_gemm_nt_masked", 1, 2, torch.zeros(2))


@pytest.mark.parametrize("error", [ImportError, OSError, AssertionError, RuntimeError])
def test_a_broken_install_is_remembered_with_its_text(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise error("libcudart.so.13: not found")

    monkeypatch.setattr(library.importlib, "import_module", broken)
    library.load.cache_clear()
    try:
        assert library.load() == (None, f"{error.__name__}: libcudart.so.13: not found")
        assert library.alignment() == 128
        with pytest.raises(RuntimeError, match=r"libcudart.so.13.*disable"):
            library.call("m_grouped_bf16_gemm_nt_masked", 1, 2, torch.zeros(2))
    finally:
        library.load.cache_clear()


def test_more_rows_than_a_block_holds_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = deep_gemm._layout("m_grouped_bf16_gemm_nt_masked", torch.zeros(200, 1, dtype=torch.int64), 0, 2)
    rows, weight = torch.zeros(2, 128, 64, dtype=torch.bfloat16), torch.zeros(2, 8, 64, dtype=torch.bfloat16)
    monkeypatch.setattr(value_checks, "ON", True)
    with pytest.raises(ValueCheckError, match=r"max\(masked_m\) <= N fails: 200 rows, N = 128"):
        layout.gemm(rows, weight, torch.bfloat16)
