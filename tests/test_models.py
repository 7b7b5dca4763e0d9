"""Hugging Face families end to end: logits, generate, what the report says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import MODELS, build

import moefx

pytest.importorskip("transformers")
EXPECTED: dict[str, dict[str, Any]] = {
    "qwen3_5_moe": {"kind": "swiglu", "gate": "sigmoid", "placement": "fused"},
    "qwen3_moe": {"kind": "swiglu", "gate": None, "placement": None},
    "qwen2_moe": {"kind": "swiglu", "gate": "sigmoid", "placement": "fused"},
    "qwen3_next": {"kind": "swiglu", "gate": "sigmoid", "placement": "fused"},
    "mixtral": {"kind": "swiglu", "gate": None, "placement": None},
    "deepseek_v3": {"kind": "swiglu", "gate": None, "placement": "fused"},
    "deepseek_v4": {"kind": "swiglu", "gate": None, "placement": "fused", "limit": 10.0, "clamp": "pre"},
    "glm4_moe": {"kind": "swiglu", "gate": None, "placement": "fused"},
    "gpt_oss": {"kind": "swiglu_oai", "gate": None, "placement": None, "limit": 7.0, "alpha": 1.702, "columns": "interleaved"},
    "olmoe": {"kind": "swiglu", "gate": None, "placement": None},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_family(name: str) -> None:
    """Same logits and tokens as the model as it was, at several lengths, without a call that falls back."""
    model = build(name)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    result = moefx.optimize(model, ep_size=2)
    layers = moefx.report(result).layers
    assert [layer["rewritten"] for layer in layers] == [True, True], [layer["reason"] for layer in layers]
    for layer in layers:
        found = {**layer["activation"], **{k: layer["shared_expert"][k] for k in ("gate", "placement")}}
        assert {k: found[k] for k in EXPECTED[name]} == EXPECTED[name]
        assert layer["dims"] == {"E_total": 8, "E": 4, "D": 32, "G": 0, "H": 64, "K": 2}
    for shape in ((2, 9), (1, 1), (3, 17)):
        ids = torch.randint(0, 256, shape)
        with torch.no_grad():
            torch.testing.assert_close(result(ids).logits, model(ids).logits, atol=2e-5, rtol=0)
    ids = torch.randint(0, 256, (2, 5))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(result.generate(ids, **options), model.generate(ids, **options))
    from moefx.swap import swapped

    assert [f.calls_left_alone for _, f in swapped(result)] == [{}, {}]
    assert swapped(model) == []
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_llama4_is_left_alone_with_a_reason() -> None:
    model = build("llama4")
    result = moefx.optimize(model)
    layers = moefx.report(result).layers
    assert len(layers) == 2 and not any(layer["rewritten"] for layer in layers)
    assert all("separates them from the router" in layer["reason"] for layer in layers)
    ids = torch.randint(0, 256, (2, 5))
    with torch.no_grad():
        assert torch.equal(result(ids).logits, model(ids).logits)


@pytest.mark.parametrize("name", ["qwen3_5_moe", "gpt_oss"])
def test_bf16_blocks_agree_with_eager(name: str) -> None:
    """Block by block: whole models may send a token to another expert for a last-bit difference."""
    model = build(name, torch.bfloat16)
    result = moefx.optimize(model)
    for layer in moefx.report(result).layers:
        assert layer["rewritten"], layer["reason"]
        assert layer["check"]["relative_error"] <= layer["check"]["tolerance"] == 3e-2


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_router_logits(name: str) -> None:
    model = build(name)
    result = moefx.optimize(model)
    ids = torch.randint(0, 256, (2, 5))
    with torch.no_grad():
        want, got = model(ids, output_router_logits=True), result(ids, output_router_logits=True)
    assert len(got.router_logits) == len(want.router_logits) == 2
    for a, b in zip(got.router_logits, want.router_logits, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=0)


def test_the_table_covers_every_model() -> None:
    assert set(EXPECTED) | {"llama4"} == set(MODELS)
