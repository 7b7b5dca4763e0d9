"""Plans from checkpoint folders: headers alone, stored formats, exclude lists, disagreement with the config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import moefx

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5_moe",
    "hidden_size": 256,
    "num_experts": 4,
    "moe_intermediate_size": 128,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 128,
    "num_hidden_layers": 4,
}


def folder(path: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    (path / "config.json").write_text(json.dumps({**CONFIG, **config}))
    save_file(tensors, path / "model.safetensors")
    return path


def stacked(
    layer: int, experts: int = 4, dtype: torch.dtype = torch.bfloat16, shared: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    at = f"model.language_model.layers.{layer}.mlp"
    return {
        f"{at}.experts.gate_up_proj": torch.zeros(experts, 256, 256).to(dtype),
        f"{at}.experts.down_proj": torch.zeros(experts, 256, 128).to(dtype),
        f"{at}.shared_expert.down_proj.weight": torch.zeros(256, 128).to(shared or dtype),
        f"{at}.shared_expert_gate.weight": torch.zeros(1, 256),
    }


def per_expert(layer: int, experts: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    at = f"model.layers.{layer}.mlp"
    found = {f"{at}.experts.{e}.down_proj.weight": torch.zeros(256, 128).to(dtype) for e in range(experts)}
    scales = {f"{at}.experts.{e}.down_proj.weight_scale_inv": torch.zeros(2, 1) for e in range(experts)}
    return {**found, **scales, f"{at}.shared_expert.down_proj.weight": torch.zeros(256, 128, dtype=torch.bfloat16)}


def test_stored_formats_make_kinds_of_layers(tmp_path: Path) -> None:
    """Layers 0 and 1 in bf16, layer 2 in FP8 with a bf16 shared expert; layer 3 has no experts."""
    tensors = {**stacked(0), **stacked(1), **stacked(2, dtype=torch.float8_e4m3fn, shared=torch.bfloat16)}
    tensors["model.language_model.layers.3.mlp.down_proj.weight"] = torch.zeros(256, 512)
    bf16, fp8 = moefx.plan(folder(tmp_path, tensors), target="sm90").layers
    assert (bf16["name"], bf16["count"], bf16["experts"]["kernel"]) == ("qwen3_5_moe layer (layers 0..1)", 2, "grouped_mm")
    assert bf16["shared_expert"]["placement"] == "fused"
    assert (fp8["name"], fp8["count"]) == ("qwen3_5_moe layer (layers 2)", 1)
    assert fp8["experts"]["kernel"] == "fp8_fallback" and fp8["shared_expert"]["placement"] == "unfused"
    assert "shared_weight_format == weight_format fails" in fp8["shared_expert"]["reason"]
    assert bf16["expert_bytes_per_rank"] == 2 * 5 * 3 * 256 * 128 * 2


def test_one_tensor_an_expert(tmp_path: Path) -> None:
    (only,) = moefx.plan(folder(tmp_path, per_expert(0, 4, torch.float8_e4m3fn)), target="sm90").layers
    assert only["count"] == 1 and only["experts"]["kernel"] in ("jit_ep", "fp8_fallback")


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        (stacked(0, experts=8), "4 experts and the checkpoint has 8"),
        (per_expert(0, 3, torch.bfloat16), "4 experts and the checkpoint has 3"),
    ],
)
def test_a_count_that_disagrees_is_an_error(tensors: dict[str, torch.Tensor], text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=text):
        moefx.plan(folder(tmp_path, tensors))


def test_a_size_that_disagrees_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"D = 64, H = 256.*experts.down_proj is \[4, 256, 128\]"):
        moefx.plan(folder(tmp_path, stacked(0), moe_intermediate_size=64, shared_expert_intermediate_size=64))


def test_no_weights_and_broken_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert moefx.plan(tmp_path).layers[0]["count"] == 4
    (tmp_path / "model.safetensors").write_bytes(b"not a header")
    with pytest.raises(ValueError, match="is no safetensors file"):
        moefx.plan(tmp_path)


def test_draft_heads_and_towers_are_not_counted(tmp_path: Path) -> None:
    tensors = {
        **stacked(0),
        **stacked(1),
        **stacked(4),
        **{n.replace("model.language_model", "mtp"): t for n, t in stacked(0, experts=8).items()},
    }
    (only,) = moefx.plan(folder(tmp_path, tensors)).layers
    assert only["count"] == 2 and only["dims"]["E_total"] == 4


def test_missing_shards_are_an_error(tmp_path: Path) -> None:
    folder(tmp_path, stacked(0))
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"1 of 2 shards are missing .*model-00002"):
        moefx.plan(tmp_path)


def test_experts_of_several_formats_have_no_kernel(tmp_path: Path) -> None:
    tensors = per_expert(0, 4, torch.bfloat16)
    tensors["model.layers.0.mlp.experts.2.down_proj.weight"] = torch.zeros(256, 128).to(torch.float8_e4m3fn)
    (only,) = moefx.plan(folder(tmp_path, tensors), target="sm90").layers
    assert not only["rewritten"] and "weight_format = mixed" in only["reason"]
