"""Run-time guards between two proved kernels, and candidates on padded sizes: in the plan and in what runs."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import moe_blocks as blocks
import pytest
import torch

import moefx
from moefx import ops
from moefx.activation.spec import Activation
from moefx.contract import Contract, Pad, Predicate
from moefx.decision import decide
from moefx.kernels import registry
from moefx.kernels.base import Kernel, as_given
from moefx.layer import Layer
from moefx.options import Options

CALLS: list[int] = []


def _few(x, ids, weights, w13, b13, w2, b2, activation, first=0):
    CALLS.append(x.shape[0])
    return ops.experts(x, ids, weights, w13, b13, w2, b2, activation, first)


_OP = ops.define(
    "experts_few_tokens(Tensor x, Tensor ids, Tensor weights, Tensor w13, Tensor? b13, Tensor w2, Tensor? b2, str activation, int first=0)"
    " -> Tensor",
    _few,
    lambda x, ids, weights, w13, b13, w2, b2, activation, first=0: x.new_empty(x.shape[0], w2.shape[1]),
)


def kernel(name: str, *predicates: str, pads: tuple[Pad, ...] = (), row_bytes: int = 0) -> Kernel:
    contract = Contract(name, tuple(Predicate(p) for p in predicates), targets=("cpu", "sm90"), pads=pads)
    return Kernel(name, contract, as_given, _OP, ops.experts, row_bytes=row_bytes)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry, "KERNELS", list(registry.KERNELS))
    CALLS.clear()
    return registry.register


def layer(**change: Any) -> Layer:
    return replace(Layer("l", "loop", 8, 96, 64, 2, Activation("swiglu"), "float32", "float32"), **change)


def test_register_refuses_names() -> None:
    with pytest.raises(ValueError, match="registered already"):
        registry.register(registry.KERNELS[0])
    with pytest.raises(ValueError, match="before='nothing'"):
        registry.register(kernel("new", "T >= 0"), before="nothing")


def test_what_depends_on_tokens_alone_is_guarded(registered: Any) -> None:
    registered(kernel("few", "T <= 64", "D % 32 == 0"))
    found = decide(layer(), Options())
    assert found.kernel and found.otherwise and (found.kernel.name, found.guard) == ("few", "(T <= 64)")
    first = found.candidates[0].to_json()
    assert first["status"] == "guarded" and first["predicates"][0]["status"] == "guarded"
    assert first["predicates"][0]["values"] == {"T": 65}, "the smallest number of tokens for which it does not hold"
    assert found.experts_json()["otherwise"] == found.otherwise.name != "few"


@pytest.mark.parametrize(
    ("change", "options", "status"),
    [
        ({"D": 80}, Options(), "refuted"),
        ({}, Options(tokens=64), "proved"),
        ({}, Options(tokens=65), "refuted"),
    ],
)
def test_a_guard_needs_the_other_predicates_and_an_open_number(change: Any, options: Options, status: str, registered: Any) -> None:
    registered(kernel("few", "T <= 64", "D % 32 == 0"))
    assert decide(layer(**change), options).candidates[0].status == status


def test_no_guard_without_another_proved_kernel(registered: Any) -> None:
    registered(kernel("few", "T <= 64"))
    names = tuple(k.name for k in registry.KERNELS if k.name != "few")
    found = decide(layer(), Options(disable=names))
    assert found.kernel is None and found.reason and "no other kernel" in found.reason
    assert decide(layer(), Options(), guards=False).candidates[0].status == "refuted"


def test_the_guard_decides_at_run_time(registered: Any) -> None:
    torch.manual_seed(0)
    registered(kernel("few", "T <= 64 or T % 100 == 0"))
    block = blocks.GatedShared().eval()
    result = moefx.optimize(block)
    found = moefx.report(result).layers[0]["experts"]
    assert (found["kernel"], found["guard"]) == ("few", "(T <= 64 or T % 100 == 0)")
    CALLS.clear()
    for again in (result, copy.deepcopy(result), pickle.loads(pickle.dumps(result))):
        for tokens in (1, 64, 65, 200):
            x = torch.randn(1, tokens, blocks.H)
            with torch.no_grad():
                torch.testing.assert_close(again(x), block(x), atol=2e-5, rtol=0)
    assert CALLS == [1, 64, 200] * 3


def test_padding_is_a_further_candidate_with_its_cost(registered: Any) -> None:
    registered(kernel("wide", "D % 64 == 0", "H % 48 == 0", pads=(Pad("D", 64), Pad("H", 48))))
    found = decide(layer(), Options(tokens=4))
    by_name = {c.kernel: c for c in found.candidates}
    assert by_name["wide"].status == "refuted" and by_name["wide+pad"].status == "proved"
    assert by_name["wide+pad"].repair == "zeros: D 96 -> 128, H 64 -> 96"
    assert by_name["wide+pad"].bytes_moved == 8 * 3 * 128 * 96 * 4 + 8 * 2 * 96 * 4 + 2 * 4 * (96 + 64) * 4
    assert found.kernel and found.kernel.name != "wide", "the fallback moves fewer bytes"


def test_padding_is_taken_when_it_is_cheaper_or_the_only_way(registered: Any) -> None:
    registered(kernel("wide", "D % 97 == 0", pads=(Pad("D", 97),)))
    many = decide(layer(), Options(tokens=4096))
    assert many.kernel and many.kernel.name == "wide" and many.pad == {"D": 97}
    few = decide(layer(), Options(tokens=1, disable=tuple(k.name for k in registry.KERNELS if k.name != "wide")))
    assert few.kernel and few.pad == {"D": 97}
    assert "wide+pad" not in [c.kernel for c in decide(layer(), Options(disable=("pad_experts",))).candidates]


@pytest.mark.parametrize("kind", ["GatedShared", "Oai", "Loop", "ClampPre"])
@pytest.mark.parametrize("ep_size", [1, 2])
def test_padded_experts_give_the_same_numbers(kind: str, ep_size: int, registered: Any) -> None:
    torch.manual_seed(0)
    registered(kernel("wide", "D % 24 == 0", "H % 40 == 0", pads=(Pad("D", 24), Pad("H", 40))))
    block = getattr(blocks, kind)().eval()
    names = tuple(k.name for k in registry.KERNELS if k.name != "wide")
    result = moefx.optimize(block, ep_size=ep_size, disable=names)
    found = moefx.report(result).layers[0]
    assert found["rewritten"] and found["experts"]["pad"] == {"D": 24, "H": 40}
    for tokens in (0, 1, 33):
        x = torch.randn(1, tokens, blocks.H)
        with torch.no_grad():
            torch.testing.assert_close(result(x), block(x), atol=2e-5, rtol=0)


def test_the_founding_case_offers_no_padding_for_jit_ep() -> None:
    found = moefx.plan("qwen3.5-35b-a3b", ep_size=2, target="sm90", precision="fp8").layers[0]["experts"]
    assert found["kernel"] == "fp8_fallback"
    assert not [c for c in found["candidates"] if c["kernel"].startswith("jit_ep") and "pad" in c["kernel"]]


def test_deep_gemm_padding_for_sizes_off_its_blocks() -> None:
    found = moefx.plan("gpt-oss-20b", target="sm90", precision="fp8").layers[0]["experts"]
    by_name = {c["kernel"]: c for c in found["candidates"]}
    assert by_name["deep_gemm_fp8_masked"]["status"] == "refuted"
    assert by_name["deep_gemm_fp8_masked+pad"]["status"] == "proved"
    assert by_name["deep_gemm_fp8_masked+pad"]["repair"] == "zeros: D 2880 -> 2944, H 2880 -> 2944"


def test_a_guard_that_divides_by_the_tokens_takes_the_other_kernel_without_any(registered: Any) -> None:
    registered(kernel("few", "64 // T >= 1"))
    block = blocks.Gathered().eval()
    result = moefx.optimize(block)
    assert moefx.report(result).layers[0]["experts"]["guard"] == "(64 // T >= 1)"
    with torch.no_grad():
        assert result(torch.zeros(1, 0, blocks.H)).shape == (1, 0, blocks.H)


@pytest.mark.parametrize("guard", ["T > 300", "T == 7", "T <= 4"])
def test_a_kernel_that_is_wrong_under_its_guard_alone_is_found_out(guard: str, registered: Any) -> None:
    registered(replace(kernel("few", guard), op=lambda *a: 1.5 * ops.experts(*a)))
    block = blocks.Gathered().eval()
    layer_found = moefx.report(moefx.optimize(block)).layers[0]
    assert not layer_found["rewritten"] and "check failed" in layer_found["reason"]


def _raises(*arguments: Any) -> Any:
    raise RuntimeError("no room in shared memory")


@pytest.mark.parametrize("broken", [{"pack": _raises}, {"op": _raises}])
def test_a_kernel_that_fails_is_named_and_the_next_one_runs(broken: dict[str, Any], registered: Any) -> None:
    registered(replace(kernel("few", "T >= 0"), **broken))
    found = moefx.report(moefx.optimize(blocks.Gathered().eval())).layers[0]
    assert found["rewritten"] and found["experts"]["kernel"] != "few"
    assert "kernel few failed on this layer" in found["warnings"][0] and "no room" in found["warnings"][0]


def test_an_op_of_another_dtype_is_found_out(registered: Any) -> None:
    registered(replace(kernel("few", "T >= 0"), op=lambda *a: ops.experts(*a).double()))
    assert not moefx.report(moefx.optimize(blocks.Gathered().eval())).layers[0]["rewritten"]


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"name": "a b"}, ValueError, "one name in lower_case"),
        ({"contract": Contract("other", ())}, ValueError, "'few' and 'other'"),
        ({"contract": Contract("few", (), targets=("tpu",))}, ValueError, "target='tpu'"),
        ({"contract": Contract("few", ("D >= 1",))}, ValueError, "Predicate objects"),  # type: ignore[arg-type]
    ],
)
def test_register_checks_what_it_is_given(change: dict[str, Any], error: type[Exception], text: str, registered: Any) -> None:
    with pytest.raises(error, match=text):
        registered(replace(kernel("few", "T >= 0"), **change))
    with pytest.raises(TypeError, match="got str"):
        registered("hello")
    with pytest.raises(ValueError, match="Pad"):
        Pad("D", 0)


def test_the_text_shows_the_guard(registered: Any) -> None:
    registered(kernel("few", "T <= 64"))
    assert "few if T <= 64, else grouped_mm" in moefx.plan("mixtral-8x7b", target="sm90").to_text(width=240)
