"""`torch.compile(model, backend="moefx")`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import moe_blocks as blocks
import pytest
import torch
import torch._dynamo
from torch import nn

import moefx
from moefx import backend


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    backend.RECORDS.clear()
    yield
    torch._dynamo.reset()


def records() -> list[Any]:
    return [r for _, _, r in backend.RECORDS]


def test_the_backend_is_registered() -> None:
    assert "moefx" in torch._dynamo.list_backends()


def test_hugging_face_model_whole_and_at_several_lengths() -> None:
    pytest.importorskip("transformers")
    from tiny_models import build

    model = build("qwen3_moe")
    compiled = torch.compile(model, backend="moefx", fullgraph=True, options={"ep_size": 2})
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        for tokens in (9, 5, 1, 17, 3, 30):
            ids = torch.randint(0, 256, (2, tokens))
            torch.testing.assert_close(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits, atol=2e-5, rtol=0)
    assert all(r.rewritten for r in records()), [r.reason for r in records()]
    assert {r.name for r in records()} == {"model.layers.0.mlp", "model.layers.1.mlp"}
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4


def test_shared_expert_and_two_ranks() -> None:
    pytest.importorskip("transformers")
    from tiny_models import build

    block = build("qwen3_5_moe").model.layers[0].mlp
    compiled = torch.compile(nn.Sequential(block), backend="moefx", options={"ep_size": 2})
    with torch.no_grad():
        for shape in ((2, 7, 64), (1, 3, 64), (4, 5, 64)):
            x = torch.randn(shape)
            torch.testing.assert_close(compiled(x), block(x), atol=2e-5, rtol=0)
    assert records() and all(r.rewritten for r in records()), [r.reason for r in records()]
    assert records()[0].decision.placement == "unfused"
    layers = moefx.report(compiled).layers
    assert len(layers) == 1 and layers[0]["rewritten"] and layers[0]["dims"]["E"] == 4


def test_training_passes_through_untouched() -> None:
    pytest.importorskip("transformers")
    from tiny_models import build

    block = build("qwen3_moe").model.layers[0].mlp
    compiled = torch.compile(block, backend="moefx")
    x = torch.randn(2, 7, 64, requires_grad=True)
    compiled(x).sum().backward()
    want = torch.autograd.grad(block(x).sum(), x)[0]
    torch.testing.assert_close(x.grad, want, atol=2e-5, rtol=1e-4)
    assert records() and not any(r.rewritten for r in records())
    assert "needs gradients" in records()[0].reason


def test_what_is_not_moe_goes_to_inductor() -> None:
    model = nn.Sequential(blocks.Mlp(), blocks.Mlp()).eval()
    x = torch.randn(3, blocks.H)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="moefx")(x), model(x))
    assert records() == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"ep_sise": 2}, "no option 'ep_sise'.*ep_size"),
        ({"ep_size": 0}, "ep_size=0"),
        ({"precision": "x"}, "precision='x'"),
        ({"a2a": "y"}, "a2a='y'"),
    ],
)
def test_bad_options(options: dict[str, Any], text: str) -> None:
    graph = torch.fx.symbolic_trace(nn.Identity())
    with pytest.raises(ValueError, match=text):
        backend.moefx_backend(graph, [torch.zeros(1)], options=options)
    with pytest.raises(ValueError, match="mode"):
        backend.moefx_backend(graph, [torch.zeros(1)], mode="max-autotune")
