"""Wild spellings: rewritten with the eager numbers, or left alone with a reason and the eager numbers."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import odd_blocks as odd
import pytest
import torch
import wild_blocks as wild
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import moefx

REWRITTEN = {
    wild.BoolMask: "loop",
    wild.NumelContinue: "loop",
    wild.UniqueLoop: "loop",
    wild.PermLoop: "loop",
    wild.SplitLoop: "loop",
    wild.SkipZero: "loop",
    wild.MoeInfer: "module_list",
    wild.DictTop1: "module_list",
    wild.SharedWeights: "module_list",
    wild.Permuted: "gathered_bmm",
    wild.PerExpertScale: "gathered_bmm",
    wild.K1Squeezed: "gathered_bmm",
    wild.KAll: "gathered_bmm",
    wild.SquareT: "gathered_bmm",
    wild.LnMid: "gathered_bmm",
    wild.IdsMod: "gathered_bmm",
    wild.RandIds: "gathered_bmm",
    wild.TupleOut: "gathered_bmm",
    wild.WeightsF32: "gathered_bmm",
    wild.IndexSelect: "gathered_bmm",
    wild.Flat: "loop",
    wild.NonzeroTuple: "loop",
    wild.DenseBool: "loop",
    wild.SeqExperts: "module_list",
}
LEFT_ALONE = {
    odd.Capacity: "canonical form",
    odd.BigCapacity: "canonical form",
    odd.TCap: "canonical form",
    odd.DiffAct: "canonical form",
    odd.OutScale: "canonical form",
    odd.NormOut: "canonical form",
    odd.Thr: "compares floating values",
    odd.Soft: "separates them from the router",
    odd.Counter: "changes count in place",
    odd.IntCounts: "made total",
    odd.Chunked: "made total",
    odd.TBranch: "another way outside",
}


def worst(result: nn.Module, block: nn.Module) -> float:
    """Largest error relative to the output's size, over sizes, scales, identical tokens."""
    found = 0.0
    for tokens in (1, 2, 7, 64, 800):
        for scale, same in ((1.0, False), (30.0, False), (1.0, True)):
            x = torch.randn(1, tokens, wild.H) * scale
            x = x[:, :1].expand_as(x).contiguous() if same else x
            with torch.no_grad():
                want, got = (torch.utils._pytree.tree_flatten(f(x)) for f in (block, result))
            assert got[1] == want[1]
            for a, b in zip(got[0], want[0], strict=True):
                if isinstance(b, torch.Tensor):
                    found = max(found, ((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1)).item())
    return found


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("kind", REWRITTEN, ids=lambda k: k.__name__)
def test_rewritten(kind: type[nn.Module]) -> None:
    block = kind().eval()
    result = moefx.optimize(block, ep_size=2)
    layer = moefx.report(result).layers[0]
    assert layer["rewritten"], layer["reason"]
    assert layer["form"] == REWRITTEN[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert worst(result, block) < 2e-6
    with torch.no_grad():
        assert torch.utils._pytree.tree_leaves(result(torch.zeros(1, 0, wild.H)))[0].shape == (1, 0, wild.H)


@pytest.mark.parametrize("kind", LEFT_ALONE, ids=lambda k: k.__name__)
def test_left_alone(kind: type[nn.Module]) -> None:
    before = (ShapeEnv.create_unbacked_symint, ShapeEnv._log_real_tensor_propagation, logging.root.manager.disable)
    block = kind().eval()
    result = moefx.optimize(block)
    layer = moefx.report(result).layers[0]
    assert not layer["rewritten"] and LEFT_ALONE[kind] in layer["reason"], layer["reason"]
    assert worst(result, block) == 0
    assert before == (ShapeEnv.create_unbacked_symint, ShapeEnv._log_real_tensor_propagation, logging.root.manager.disable)


SHARED: dict[Any, tuple[bool, str | None, str]] = {
    odd.TwoShared: (True, "unfused", "2 separate shared experts"),
    odd.BiasShared: (True, "unfused", "has a bias"),
    odd.BiasBoth: (True, "fused", "2 slots"),
    odd.GateScaled: (True, "unfused", "something other than a sigmoid gate"),
    odd.BothScaled: (True, "fused", "1 slot"),
    odd.SharedOnOther: (False, None, ""),
    odd.SharedMinus: (False, None, ""),
}


@pytest.mark.parametrize("kind", SHARED, ids=lambda k: k.__name__)
def test_shared_experts(kind: type[nn.Module]) -> None:
    present, placement, reason = SHARED[kind]
    block = kind().eval()
    result = moefx.optimize(block, ep_size=2)
    layer = moefx.report(result).layers[0]
    assert layer["rewritten"]
    assert (layer["shared_expert"]["present"], layer["shared_expert"]["placement"]) == (present, placement)
    assert reason in (layer["shared_expert"]["reason"] or "")
    assert worst(result, block) < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("kind", [wild.Loop, wild.NumelContinue])
def test_many_experts(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wild, "E", 64)
    monkeypatch.setattr(kind, "experts_count", 64)
    block = kind().eval()
    result = moefx.optimize(block)
    assert moefx.report(result).layers[0]["rewritten"]
    assert worst(result, block) < 2e-6
