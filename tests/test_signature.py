"""Which blocks share one trace."""

from __future__ import annotations

import copy

import moe_blocks as blocks
import pytest
import torch
from torch import nn

import moefx
from moefx import pipeline
from moefx.signature import signature


def changed(block: nn.Module, how: str) -> nn.Module:
    block = copy.deepcopy(block)
    if how == "attribute":
        block.limit = 0.25
    elif how == "list":
        block.limits = [0.5, None]
    elif how == "shape":
        block.w13 = nn.Parameter(torch.randn(4, 16, 32))
    elif how == "dtype":
        block.router.to(torch.float64)
    elif how == "class":
        block.__class__ = blocks.ClampRoutedOnly
    elif how == "missing":
        block.b2 = nn.Parameter(torch.zeros(4, 32))
    return block


@pytest.mark.parametrize("how", ["attribute", "list", "shape", "dtype", "class", "missing"])
def test_what_is_no_tensor_value_tells_blocks_apart(how: str) -> None:
    block = blocks.ClampPre().eval()
    assert signature(block) == signature(blocks.ClampPre().eval())
    assert signature(block) != signature(changed(block, how))


def test_alike_layers_are_traced_once_and_keep_their_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = []
    real = pipeline.trace
    monkeypatch.setattr(pipeline, "trace", lambda *args, **kwargs: traced.append(args[0].name) or real(*args, **kwargs))
    torch.manual_seed(0)
    model = nn.Sequential(blocks.GatedShared(), blocks.GatedShared(), blocks.ClampPre(), blocks.GatedShared()).eval()
    result = moefx.optimize(model, ep_size=2)
    assert traced == ["0", "2"]
    assert [layer["name"] for layer in moefx.report(result).layers] == ["0", "1", "2", "3"]
    assert all(layer["rewritten"] and layer["check"]["ran"] for layer in moefx.report(result).layers)
    x = torch.randn(2, 9, blocks.H)
    with torch.no_grad():
        torch.testing.assert_close(result(x), model(x), atol=2e-5, rtol=0)
