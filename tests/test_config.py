"""The config reader against the models of transformers: what `layers(config)` says is what the modeling files build."""

from __future__ import annotations

import dataclasses
import importlib
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from moefx.hf_config import layers
from moefx.hf_families import FAMILIES
from moefx.hf_rules import CLASS_OF
from moefx.layer import Layer

pytest.importorskip("transformers")

# Sizes that differ from each other, given where the config class has a field of this name. Each size has one value in every spelling.
SIZES: dict[int, tuple[str, ...]] = {
    6: ("num_hidden_layers",),
    96: ("hidden_size",),
    16: ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
    24: ("moe_intermediate_size", "expert_ffn_hidden_size"),
    40: ("intermediate_size",),
    56: (
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "shared_experts_intermediate_size",
        "share_expert_dim",
    ),
    3: ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"),
}

# What a family needs besides: a value the class does not default, one its checks insist on, or one that makes it a mixture of experts.
NEEDS: dict[str, dict[str, Any]] = {
    "dbrx": {
        "n_layers": 6,
        "d_model": 96,
        "attn_config": {"rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 24, "moe_top_k": 3, "moe_num_experts": 16},
    },
    "deepseek_ocr2": {"mlp_layer_types": ["dense"] + ["sparse"] * 5},
    "diffusion_gemma": {"num_global_key_value_heads": 2},
    "doge": {"is_moe": True, "num_experts": 64},
    "dots1": {"n_shared_experts": 2},
    "ernie4_5_vl_moe": {"moe_intermediate_size": [24, 16], "hidden_size": 2560},
    "gemma4": {"enable_moe_block": True},
    "granitemoehybrid": {"mamba_n_heads": 8},
    "hunyuan_v1_moe": {"head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 3},
    "longcat_flash": {"num_layers": 6, "num_hidden_layers": None, "zero_expert_num": 4},
    "muse_spark": {"num_attention_heads": 8, "num_key_value_heads": 8, "moe_hidden_size": 72},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp", "moe"]},
    "qwen3_omni_moe_talker": {"shared_expert_intermediate_size": 56},
    "qwen4_exp": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 64, "indexer_compress_ratio": 4},
    "unlimited_ocr": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}
# Families with no class of their own in the auto mappings, or experts of another shape than one 3-D parameter.
MODEL_CLASS = {
    "deepseek_ocr2": "DeepseekOcr2TextModel",
    "diffusion_gemma": "DiffusionGemmaEncoderTextModel",
    "ernie4_5_vl_moe": "Ernie4_5_VLMoeTextModel",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerTextModel",
    "qwen3_omni_moe_talker": "Qwen3OmniMoeTalkerModel",
    "step3p5": "Step3p7TextModel",
    "unlimited_ocr": "UnlimitedOcrTextModel",
}
EXPERTS_CLASS = {
    "dbrx": "DbrxExperts",
    "doge": "DogeCDMoE",
    "jetmoe": "JetMoeMoE",
    "nllb-moe": "NllbMoeExperts",
    "switch_transformers": "SwitchTransformersExperts",
}
# Counts that the defaults do not exercise.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("afmoe", {"num_dense_layers": 4}),
    ("axk1", {"first_k_dense_replace": 2, "moe_layer_freq": 2}),
    ("bailing_hybrid", {"first_k_dense_replace": 4}),
    ("cohere2_moe", {"first_k_dense_replace": 2, "num_shared_experts": 2}),
    ("deepseek_v3", {"first_k_dense_replace": 1, "n_shared_experts": 3}),
    ("deepseek_v4", {"swiglu_limit": 5.0}),
    *[
        (name, {"mlp_bias": True})
        for name in (
            "aria",
            "deepseek_ocr2",
            "deepseek_v2",
            "deepseek_v32",
            "deepseek_v4",
            "dots3_note",
            "glm_moe_dsa",
            "hy_v3",
            "hy_v4",
            "step3p5",
            "unlimited_ocr",
        )
    ],
    ("ernie4_5_vl_moe", {"use_bias": True}),
    ("dots3_note", {"first_k_dense_replace": 2, "moe_layer_freq": [1, 1, 0, 1, 0, 1]}),
    ("ernie4_5_moe", {"moe_layer_interval": 2, "moe_layer_start_index": 2, "moe_layer_end_index": 4, "use_bias": True}),
    ("ernie4_5_moe", {"moe_num_shared_experts": 0}),
    ("exaone_moe", {"mlp_layer_types": ["sparse", "dense", "sparse", "dense", "dense", "sparse"]}),
    ("flint", {"mlp_only_layers": [3], "decoder_sparse_step": 2}),
    ("glm4_moe", {"first_k_dense_replace": 3, "hidden_act": "gelu"}),
    ("gpt_oss", {"swiglu_limit": 3.0}),
    ("granitemoehybrid", {"num_local_experts": 0}),
    ("granitemoeshared", {"shared_intermediate_size": 0}),
    ("inkling", {"dense_mlp_idx": 2}),
    ("jamba", {"expert_layer_period": 3, "expert_layer_offset": 2}),
    ("kimi_linear", {"first_k_dense_replace": 3}),
    ("lfm2_moe", {"num_dense_layers": 1}),
    ("llama4", {"interleave_moe_layer_step": 2}),
    ("llama4", {"moe_layers": [1, 2, 5]}),
    ("minimax_m3_vl", {"moe_layer_freq": [0, 0, 1, 1, 0, 1], "swiglu_limit": 5.0}),
    ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "MEM*EE-E", "mlp_bias": True}),
    ("nemotron_h", {"moe_latent_size": 72}),
    ("qwen2_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    ("qwen3_moe", {"hidden_act": "gelu_pytorch_tanh"}),
    ("qwen3_next", {"mlp_only_layers": [0, 5]}),
    ("step3p5", {"moe_layers_enum": "1,3,4", "swiglu_limits": [0.0, 7.0, 0.0, 7.0, 0.0, 9.0], "swiglu_limits_shared": [4.0] * 6}),
    ("unlimited_ocr", {"first_k_dense_replace": 2}),
]
CASES = [(name, {}) for name in FAMILIES if name not in CLASS_OF] + VARIANTS


def config_class(name: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[name if name == "qwen2_moe" or f"{name}_text" not in CONFIG_MAPPING else f"{name}_text"]


def values_of(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    fields = {field.name for field in dataclasses.fields(config_class(name))}
    small = {key: size for size, keys in SIZES.items() for key in keys if key in fields}
    return {key: value for key, value in {**small, **NEEDS.get(name, {}), **changes}.items() if value is not None}


def on_meta(name: str, changes: dict[str, Any]) -> tuple[Any, nn.Module]:
    """The config and its model, without storage."""
    from transformers import AutoModel

    config = config_class(name)(**values_of(name, changes))
    with torch.device("meta"):
        if name not in MODEL_CLASS:
            return config, AutoModel.from_config(config)
        module = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
        return config, getattr(module, MODEL_CLASS[name])._from_config(config)


def expert_sets(name: str, model: nn.Module) -> list[nn.Module]:
    """The modules that hold routed experts: one 3-D down projection, or a class of EXPERTS_CLASS."""
    return [
        module
        for path, module in model.named_modules()
        if type(module).__name__ == EXPERTS_CLASS.get(name)
        or ("shared" not in path and any(p.dim() == 3 and key == "down_proj" for key, p in module.named_parameters(recurse=False)))
    ]


def sizes_of(experts: nn.Module) -> tuple[int, int, int]:
    """E, D, H of one expert set."""
    own = dict(experts.named_parameters())
    for key in ("expert_0.fc1.weight", "expert_0.wi.weight"):
        if key in own:
            return sum("expert_" in name for name, _ in experts.named_children()), own[key].shape[0], own[key].shape[1]
    if "down_embed.weight" in own:
        return own["down_embed.weight"].shape[0], 1, own["down_embed.weight"].shape[1]
    if "mlp.w1" in own:
        return experts.num_experts, own["mlp.w1"].shape[0] // experts.num_experts, own["mlp.w1"].shape[1]  # type: ignore[return-value,operator]
    down = own["output_linear.weight"] if "output_linear.weight" in own else own["down_proj"]
    up = own.get("input_linear.weight", own.get("up_proj", own.get("gate_up_proj")))
    assert up is not None
    width, hidden = (2, 1) if up.shape[2] == down.shape[1] else (1, 2)
    return down.shape[0], down.shape[width], down.shape[hidden]


def check_activation(layer: Layer, experts: nn.Module) -> None:
    """The activation of the layer on numbers beyond every clamp, against the module's own."""
    if layer.activation.kind == "opaque":
        return
    h = torch.randn(7, 2 * layer.D if layer.activation.gated else layer.D, generator=torch.Generator().manual_seed(0)) * 12
    if hasattr(experts, "_apply_gate"):
        theirs = experts._apply_gate(h) if layer.activation.gated else experts.act_fn(h)  # type: ignore[operator]
    else:
        act = next(getattr(m, key) for m in experts.modules() for key in ("act_fn", "activation_fn", "activation") if hasattr(m, key))
        gate, up = h.chunk(2, dim=-1)
        theirs = act(gate) * up
    torch.testing.assert_close(layer.activation(h), theirs)


def check_shared(found: list[Layer], model: nn.Module) -> None:
    """Number, width, columns, bias, gate and activation of the shared experts."""
    modules = [m for path, m in model.named_modules() if path.rpartition(".")[2] in ("shared_expert", "shared_experts", "shared_mlp")]
    expected = [layer for layer in found for _ in range(layer.count) if layer.shared is not None]
    assert len(expected) == len(modules)
    gated = any("shared_expert_gate" in path for path, _ in model.named_modules())
    for layer, module in zip(expected[:1], modules[:1], strict=True):
        assert layer.shared is not None
        assert gated == (layer.shared.gate == "sigmoid")
        own = dict(module.named_parameters())
        down = next(own[key] for key in ("down_proj.weight", "w2.weight", "output_linear.weight", "down_proj") if key in own)
        if down.dim() == 3:
            assert down.shape[0] * down.shape[2] == layer.shared.D
            continue
        assert down.shape[1] == layer.shared.D
        assert any("bias" in key for key in own) == layer.shared.bias
        if layer.shared.activation.gated:
            assert ("gate_proj.weight" in own or "w1.weight" in own) == (layer.shared.activation.columns == "separate")
        module = module.to_empty(device="cpu")
        torch.manual_seed(0)
        for parameter in module.parameters():
            nn.init.normal_(parameter)
        x = torch.randn(5, down.shape[0])
        first = [p for key, p in module.named_children() if key in ("gate_proj", "w1", "up_proj", "w3", "input_linear", "gate_up_proj")]
        h = torch.cat([linear(x) for linear in first], dim=-1)
        last = next(p for key, p in module.named_children() if key in ("down_proj", "w2", "output_linear"))
        torch.testing.assert_close(last(layer.shared.activation(h)), module(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "changes"), CASES, ids=lambda v: v if isinstance(v, str) else "-".join(v))
def test_layers_are_those_of_the_model(name: str, changes: dict[str, Any]) -> None:
    config, model = on_meta(name, changes)
    found = layers(config.to_dict())
    real = expert_sets(name, model)
    expected = Counter((layer.E_total, layer.D, layer.H) for layer in found for _ in range(layer.count))
    assert expected == Counter(sizes_of(experts) for experts in real)
    routers = {m.top_k for m in model.modules() if isinstance(getattr(m, "top_k", None), int)}
    assert routers <= {layer.K for layer in found} or name in ("jetmoe",)
    for layer in found:
        same = [experts for experts in real if sizes_of(experts) == (layer.E_total, layer.D, layer.H)]
        if len(found) == 1 or FAMILIES[name][0].part:
            assert layer.bias == any(key.endswith(("proj_bias", "fc1.bias")) for key, _ in same[0].named_parameters())
            check_activation(layer, same[0])
        else:
            limits = Counter(m.limit for m in same)
            assert limits[layer.activation.limit or float("inf")] == layer.count
    if found:
        check_shared(found, model)
    assert layers({**values_of(name, changes), "model_type": config.model_type}) == found


# Config classes that lack a size of their own: nothing can be built from them.
LACKING = ("deepseek_ocr2", "deepseek_v2", "dots1", "qwen3_omni_moe_talker", "diffusion_gemma")
DENSE = ("doge", "gemma4", "hunyuan_v1_moe")


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in CLASS_OF and name not in LACKING])
def test_a_model_type_alone_is_the_class_with_its_defaults(name: str) -> None:
    config = config_class(name)()
    found = layers({"model_type": config.model_type})
    assert found == layers(config.to_dict())
    assert (found == []) == (name in DENSE)
