"""Hugging Face models with random weights, small enough for a test: hidden 64, two layers, 8 experts of 32, top-2."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MLA = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 8,
    "num_key_value_heads": 4,
}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", {**EXPERTS, **LINEAR, "shared_expert_intermediate_size": 32}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**EXPERTS, "intermediate_size": 32}),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", {**EXPERTS, "intermediate_size": 32, "shared_expert_intermediate_size": 64}),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {**EXPERTS, **LINEAR, "shared_expert_intermediate_size": 32}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", LOCAL),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {**ROUTED, **MLA, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 0, "intermediate_size": 64},
    ),
    "deepseek_v4": (
        "DeepseekV4Config",
        "DeepseekV4ForCausalLM",
        {**ROUTED, "mlp_layer_types": ["hash_moe", "moe"], "head_dim": None, "num_key_value_heads": None},
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {**ROUTED, "n_shared_experts": 1, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "intermediate_size": 64},
    ),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {**LOCAL, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32},
    ),
    "olmoe": (
        "OlmoeConfig",
        "OlmoeForCausalLM",
        {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32, "head_dim": None, "eos_token_id": None},
    ),
    "llama4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {**LOCAL, "num_experts_per_tok": 1, "intermediate_size_mlp": 64, "interleave_moe_layer_step": 1},
    ),
}


def build(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model in eval mode; experts and routers with a spread that makes them differ."""
    import transformers

    config_class, model_class, values = MODELS[name]
    values = {k: v for k, v in {**BASE, **values}.items() if v is not None or k == "eos_token_id"}
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**values))
    torch.manual_seed(0)
    for key, parameter in model.named_parameters():
        if parameter.dim() >= 2 and any(word in key for word in ("expert", "gate", "router", "mlp")):
            nn.init.normal_(parameter, std=0.2)
    return model.to(dtype).eval()
