"""Configs as files have them: wrapped, incomplete, dense, unknown; and the built-in models."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from moefx import hf_rules
from moefx.hf_config import layers
from moefx.models import BUILT_IN

pytest.importorskip("transformers")

WRAPPED: list[tuple[dict[str, Any], int, tuple[int, int, int, int]]] = [
    ({"model_type": "aria", "text_config": {"num_hidden_layers": 4, "moe_num_experts": 64}}, 4, (64, 4096, 4096, 2)),
    ({"model_type": "glm4v_moe", "text_config": {"num_hidden_layers": 4}}, 3, (128, 1408, 4096, 8)),
    ({"model_type": "llama4", "text_config": {"num_hidden_layers": 4, "interleave_moe_layer_step": 2}}, 2, (16, 8192, 5120, 1)),
    ({"model_type": "qwen3_5_moe", "text_config": {"num_hidden_layers": 4}}, 4, (256, 512, 2048, 8)),
    # The released MiniMax-M3 checkpoint calls its text config minimax_m2.
    (
        {"model_type": "minimax_m3_vl", "text_config": {"model_type": "minimax_m2", "moe_layer_freq": [0, 1], "num_hidden_layers": 2}},
        1,
        (128, 3072, 6144, 4),
    ),
    ({"model_type": "mistral3", "text_config": {"model_type": "mistral4", "num_hidden_layers": 4}}, 4, (128, 2048, 4096, 4)),
    (
        {"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2", "n_routed_experts": 384, "first_k_dense_replace": 1}},
        60,
        (384, 2048, 7168, 8),
    ),
    (
        {"model_type": "qwen3_omni_moe", "thinker_config": {"model_type": "qwen3_omni_moe_thinker", "text_config": {}}},
        28,
        (128, 768, 2048, 8),
    ),
]


@pytest.mark.parametrize(("config", "count", "sizes"), WRAPPED, ids=lambda v: v["model_type"] if isinstance(v, dict) else "")
def test_wrappers_are_read_through(config: dict[str, Any], count: int, sizes: tuple[int, int, int, int]) -> None:
    (found,) = layers(config)
    assert (found.count, found.E_total, found.D, found.H, found.K) == (count, *sizes)


def test_layers_that_differ_are_kinds_of_their_own() -> None:
    config = {
        "model_type": "hunyuan_v1_moe",
        "num_experts": 8,
        "moe_topk": [2, 4, 4],
        "num_hidden_layers": 3,
        "hidden_size": 64,
        "intermediate_size": 32,
    }
    assert [(layer.count, layer.K) for layer in layers(config)] == [(1, 2), (2, 4)]
    names = [layer.name for layer in layers({"model_type": "ernie4_5_vl_moe_text"})]
    assert names == ["ernie4_5_vl_moe_text text experts layer", "ernie4_5_vl_moe_text vision experts layer"]


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gemma4_text"},
        {"model_type": "llama", "hidden_size": 64},
        {"model_type": "granitemoehybrid", "num_local_experts": 0},
        {"model_type": "some_new_model", "num_experts": 1},
        {"model_type": "llava", "text_config": {"model_type": "llama"}},
    ],
)
def test_dense_configs_have_no_layers(config: dict[str, Any]) -> None:
    assert layers(config) == []


def test_an_unknown_family_is_named() -> None:
    with pytest.raises(ValueError, match="'some_new_model' is not in moefx's table"):
        layers({"model_type": "some_new_model", "num_experts": 8})


def test_what_the_modeling_file_forbids_is_left_alone() -> None:
    from moefx import plan

    for name in ("llama4_text", "longcat_flash", "muse_spark_text", "jetmoe", "nllb-moe", "switch_transformers"):
        for record in plan({"model_type": name}, ep_size=1).layers:
            assert not record["rewritten"] and record["reason"], name


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "granitemoehybrid"}, "outside the block"),
        ({"model_type": "hy_v3"}, "float32"),
        ({"model_type": "hy_v3", "enable_moe_fp32_combine": False}, None),
        ({"model_type": "minimax_m3_vl_text"}, "scaled"),
        ({"model_type": "nemotron_h", "moe_latent_size": 512}, "projection"),
        ({"model_type": "glm4_moe", "hidden_act": "relu"}, "no named variant"),
        ({"model_type": "glm4_moe"}, None),
    ],
)
def test_shared_experts_that_cannot_be_slots_say_why(config: dict[str, Any], reason: str | None) -> None:
    (found,) = layers(config)
    assert found.shared is not None
    assert (found.shared_why_unfused is None) if reason is None else (reason in str(found.shared_why_unfused))


@pytest.fixture
def no_transformers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """transformers cannot be imported."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    hf_rules._class_defaults.cache_clear()
    yield
    hf_rules._class_defaults.cache_clear()


@pytest.mark.usefixtures("no_transformers")
def test_a_missing_key_is_named_where_transformers_cannot_fill_it_in() -> None:
    with pytest.raises(ValueError, match="mixtral config has none of num_hidden_layers.*not installed"):
        layers({"model_type": "mixtral"})
    with pytest.raises(ValueError, match="none of intermediate_size"):
        layers({"model_type": "mixtral", "num_hidden_layers": 2, "num_local_experts": 8, "hidden_size": 64})


@pytest.mark.usefixtures("no_transformers")
def test_built_in_models_are_complete() -> None:
    assert len(BUILT_IN) >= 28
    for name, (config, source) in BUILT_IN.items():
        found = layers(config)
        assert all(layer.E_total > layer.K for layer in found), name
        assert 0 < sum(layer.count for layer in found) <= config["num_hidden_layers"] and len(found) <= 2, name
        assert source, name


@pytest.mark.parametrize("name", [name for name, (_, source) in BUILT_IN.items() if "defaults of transformers" in source])
def test_built_in_models_are_their_config_class(name: str) -> None:
    import transformers

    config, source = BUILT_IN[name]
    defaults = getattr(transformers, source.partition(",")[0])().to_dict()
    assert [replace(layer, name="") for layer in layers(config)] == [replace(layer, name="") for layer in layers(defaults)]
