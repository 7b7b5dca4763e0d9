"""`moefx.optimize` on one block of every spelling: same numbers, right description."""

from __future__ import annotations

import copy
from typing import Any

import moe_blocks as blocks
import pytest
import torch
from torch import nn

import moefx

SHAPES = ((2, 7, blocks.H), (1, 1, blocks.H), (3, 16, blocks.H), (1, 0, blocks.H))


def run(block: nn.Module, **options: Any) -> tuple[nn.Module, dict[str, Any]]:
    """The optimised block, compared with the block on every shape, and its layer of the report."""
    result = moefx.optimize(block, **options)
    with torch.no_grad():
        for shape in SHAPES:
            x = torch.randn(shape)
            torch.testing.assert_close(result(x), block(x), atol=2e-5, rtol=0)
    return result, moefx.report(result).layers[0]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


REWRITTEN = [
    (blocks.Loop, "loop", {"kind": "swiglu", "limit": None, "columns": "concat"}),
    (blocks.ListLoop, "module_list", {"kind": "swiglu", "columns": "separate"}),
    (blocks.Gathered, "gathered_bmm", {"kind": "swiglu"}),
    (blocks.Grouped, "grouped_mm", {"kind": "swiglu"}),
    (blocks.Dense, "dense", {"kind": "swiglu"}),
    (blocks.Transposed, "gathered_bmm", {"kind": "swiglu", "columns": "separate"}),
    (blocks.ClampPre, "gathered_bmm", {"kind": "swiglu", "limit": 0.5, "clamp": "pre"}),
    (blocks.ClampPost, "gathered_bmm", {"kind": "swiglu", "limit": 0.25, "clamp": "post", "columns": "concat_up_first"}),
    (blocks.Oai, "loop", {"kind": "swiglu_oai", "limit": 0.7, "alpha": 1.702, "beta": 1.0, "columns": "interleaved"}),
    (blocks.Softcap, "gathered_bmm", {"kind": "opaque"}),
    (blocks.Threshold, "gathered_bmm", {"kind": "swiglu"}),
]


@pytest.mark.parametrize("ep_size", [1, 2])
@pytest.mark.parametrize(("kind", "form", "activation"), REWRITTEN, ids=[k.__name__ for k, _, _ in REWRITTEN])
def test_rewritten(kind: type[nn.Module], form: str, activation: dict[str, Any], ep_size: int) -> None:
    _, layer = run(kind().eval(), ep_size=ep_size)
    assert layer["rewritten"], layer["reason"]
    assert layer["form"] == form
    assert {k: layer["activation"][k] for k in activation} == pytest.approx(activation) if "limit" in activation else True
    assert layer["activation"]["kind"] == activation["kind"]
    assert layer["dims"] == {"E_total": 4, "E": 4 // ep_size, "D": 16, "G": 0, "H": 32, "K": 2}
    assert layer["check"]["ran"] and layer["check"]["max_abs_error"] < 2e-5


@pytest.mark.parametrize("kind", [blocks.WeightedInput, blocks.Subset, blocks.ExpertChoice])
def test_left_alone_with_a_reason(kind: type[nn.Module]) -> None:
    block = kind().eval()
    result = moefx.optimize(block)
    layer = moefx.report(result).layers[0]
    assert not layer["rewritten"]
    assert len(layer["reason"]) > 20
    x = torch.randn(2, 7, blocks.H)
    with torch.no_grad():
        assert torch.equal(result(x), block(x))


SHARED = [
    (blocks.GatedShared, {}, "sigmoid", "fused", "1 slot"),
    (blocks.GatedShared, {"ep_size": 2, "a2a": "mori"}, "sigmoid", "unfused", "one physical shared slot on every rank"),
    (blocks.GatedShared, {"ep_size": 2, "a2a": "none"}, "sigmoid", "fused", "1 slot"),
    (blocks.WideShared, {}, "sigmoid", "fused", "3 slots"),
    (blocks.WideShared, {"ep_size": 4}, "sigmoid", "fused", "3 slots"),
    (blocks.ClampRoutedOnly, {}, "sigmoid", "unfused", "limit = 0.5"),
    (blocks.ScaledAfter, {}, None, "unfused", "passes mul"),
    (blocks.GatedShared, {"disable": ("fuse_shared_expert",)}, "sigmoid", "unfused", "disabled"),
]


@pytest.mark.parametrize(("kind", "options", "gate", "placement", "reason"), SHARED)
def test_shared_expert(kind: type[nn.Module], options: dict[str, Any], gate: str | None, placement: str, reason: str) -> None:
    _, layer = run(kind().eval(), **options)
    shared = layer["shared_expert"]
    assert layer["rewritten"]
    assert (shared["present"], shared["gate"], shared["placement"]) == (True, gate, placement)
    assert reason in shared["reason"]


def test_two_layers_of_one_class_keep_their_own_limits() -> None:
    first, second = blocks.ClampPre(), blocks.ClampPre()
    second.limit = 0.25
    model = nn.Sequential(first, second).eval()
    result = moefx.optimize(model)
    assert [r["activation"]["limit"] for r in moefx.report(result).layers] == [0.5, 0.25]
    x = torch.randn(2, 9, blocks.H) * 3
    with torch.no_grad():
        torch.testing.assert_close(result(x), model(x), atol=2e-5, rtol=0)


def test_the_clamp_is_in_the_result() -> None:
    """On values far past the limit, a result without the clamp would be off by orders of magnitude."""
    block = blocks.ClampPre().eval()
    result, _ = run(block, ep_size=2)
    plain = copy.deepcopy(block)
    plain.limit = 1e9
    x = torch.randn(1, 8, blocks.H) * 20
    with torch.no_grad():
        torch.testing.assert_close(result(x), block(x), atol=2e-5, rtol=0)
        assert (plain(x) - block(x)).abs().max() > 1


def test_no_moe_is_a_report_and_an_error_when_strict() -> None:
    model = blocks.Mlp().eval()
    report = moefx.report(moefx.optimize(model))
    assert report.layers == []
    assert "no mixture-of-experts layer" in report.skipped[0]["reason"]
    with pytest.raises(RuntimeError, match="strict"):
        moefx.optimize(model, strict=True)
    with pytest.raises(RuntimeError, match="WeightedInput"):
        moefx.optimize(blocks.WeightedInput().eval(), strict=True)


def test_a_wrong_rewrite_is_refused_by_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that forgets half of the sum is found out, and the block stays as it was."""
    from dataclasses import replace

    from moefx.kernels import registry

    right = registry.by_name("grouped_mm")
    wrong = replace(right, op=lambda *args: 0.5 * right.op(*args))
    monkeypatch.setattr(registry, "KERNELS", (wrong,))
    block = blocks.Gathered().eval()
    result = moefx.optimize(block)
    layer = moefx.report(result).layers[0]
    assert not layer["rewritten"]
    assert "check failed" in layer["reason"]
    x = torch.randn(2, 7, blocks.H)
    with torch.no_grad():
        assert torch.equal(result(x), block(x))


class Sizes(blocks.Gathered):
    experts_count, hidden, width = 8, 64, 32


@pytest.mark.parametrize("kind", [Sizes, blocks.Loop, blocks.Oai])
def test_bf16_is_as_precise_as_eager(kind: type[nn.Module]) -> None:
    """Against the block in float64 on the same bf16 weights: no more than 1.5 times eager's own error."""
    block = kind().to(torch.bfloat16).eval()
    result = moefx.optimize(block)
    assert moefx.report(result).layers[0]["rewritten"]
    exact = copy.deepcopy(block).double()
    ratios = []
    for _ in range(5):
        x = torch.randn(1, 64, block.router.in_features, dtype=torch.bfloat16)
        with torch.no_grad():
            want = exact(x.double())
            same = (block.router(x).topk(2).indices == exact.router(x.double()).topk(2).indices).all(-1)
            mine, theirs = ((f(x).double() - want)[same].abs().mean().item() for f in (result, block))
        ratios.append(mine / theirs)
    assert sum(ratios) / len(ratios) <= 1.5
