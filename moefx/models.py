"""Built-in model sizes for `moefx plan NAME`: the bf16 checkpoints, sizes only, each with the source of its numbers."""

from __future__ import annotations

from typing import Any

_DEFAULTS = "defaults of transformers 5.24's config class"

BUILT_IN: dict[str, tuple[dict[str, Any], str]] = {
    "qwen3.5-35b-a3b": (
        dict(
            model_type="qwen3_5_moe",
            hidden_size=2048,
            num_experts=256,
            moe_intermediate_size=512,
            num_experts_per_tok=8,
            shared_expert_intermediate_size=512,
            num_hidden_layers=40,
        ),
        f"Qwen3_5MoeTextConfig, {_DEFAULTS}",
    ),
    "qwen3.5-397b-a17b": (
        dict(
            model_type="qwen3_5_moe",
            hidden_size=4096,
            num_experts=512,
            moe_intermediate_size=1024,
            num_experts_per_tok=10,
            shared_expert_intermediate_size=1024,
            num_hidden_layers=60,
        ),
        "config.json of Qwen/Qwen3.5-397B-A17B; 512 + 1 experts also in sglang#31336",
    ),
    "qwen3-30b-a3b": (
        dict(
            model_type="qwen3_moe",
            hidden_size=2048,
            num_experts=128,
            moe_intermediate_size=768,
            num_experts_per_tok=8,
            num_hidden_layers=48,
        ),
        f"Qwen3MoeConfig, {_DEFAULTS}; 48 layers from config.json of Qwen/Qwen3-30B-A3B",
    ),
    "qwen3-next-80b-a3b": (
        dict(
            model_type="qwen3_next",
            hidden_size=2048,
            num_experts=512,
            moe_intermediate_size=512,
            num_experts_per_tok=10,
            shared_expert_intermediate_size=512,
            num_hidden_layers=48,
        ),
        f"Qwen3NextConfig, {_DEFAULTS}",
    ),
    "qwen1.5-moe-a2.7b": (
        dict(
            model_type="qwen2_moe",
            hidden_size=2048,
            num_experts=60,
            moe_intermediate_size=1408,
            num_experts_per_tok=4,
            shared_expert_intermediate_size=5632,
            num_hidden_layers=24,
        ),
        f"Qwen2MoeConfig, {_DEFAULTS}",
    ),
    "deepseek-v3": (
        dict(
            model_type="deepseek_v3",
            hidden_size=7168,
            n_routed_experts=256,
            moe_intermediate_size=2048,
            num_experts_per_tok=8,
            n_shared_experts=1,
            num_hidden_layers=61,
            first_k_dense_replace=3,
        ),
        f"DeepseekV3Config, {_DEFAULTS}",
    ),
    "deepseek-v4-flash": (
        dict(
            model_type="deepseek_v4",
            hidden_size=4096,
            n_routed_experts=256,
            moe_intermediate_size=2048,
            num_experts_per_tok=6,
            n_shared_experts=1,
            swiglu_limit=10.0,
            num_hidden_layers=43,
        ),
        f"DeepseekV4Config, {_DEFAULTS}",
    ),
    "mixtral-8x7b": (
        dict(
            model_type="mixtral",
            hidden_size=4096,
            num_local_experts=8,
            intermediate_size=14336,
            num_experts_per_tok=2,
            num_hidden_layers=32,
        ),
        f"MixtralConfig, {_DEFAULTS}",
    ),
    "gpt-oss-120b": (
        dict(
            model_type="gpt_oss",
            hidden_size=2880,
            num_local_experts=128,
            intermediate_size=2880,
            num_experts_per_tok=4,
            num_hidden_layers=36,
        ),
        f"GptOssConfig, {_DEFAULTS}",
    ),
    "gpt-oss-20b": (
        dict(
            model_type="gpt_oss",
            hidden_size=2880,
            num_local_experts=32,
            intermediate_size=2880,
            num_experts_per_tok=4,
            num_hidden_layers=24,
        ),
        "config.json of openai/gpt-oss-20b",
    ),
    "olmoe-1b-7b": (
        dict(model_type="olmoe", hidden_size=2048, num_experts=64, intermediate_size=1024, num_experts_per_tok=8, num_hidden_layers=16),
        "config.json of allenai/OLMoE-1B-7B-0924",
    ),
    "glm-4.5-air": (
        dict(
            model_type="glm4_moe",
            hidden_size=4096,
            n_routed_experts=128,
            moe_intermediate_size=1408,
            num_experts_per_tok=8,
            n_shared_experts=1,
            num_hidden_layers=46,
            first_k_dense_replace=1,
        ),
        f"Glm4MoeConfig, {_DEFAULTS}",
    ),
    "glm-5": (
        dict(
            model_type="glm_moe_dsa",
            hidden_size=6144,
            n_routed_experts=256,
            moe_intermediate_size=2048,
            num_experts_per_tok=8,
            n_shared_experts=1,
            num_hidden_layers=78,
            first_k_dense_replace=3,
        ),
        f"GlmMoeDsaConfig, {_DEFAULTS}",
    ),
    "llama-4-scout": (
        dict(
            model_type="llama4_text",
            hidden_size=5120,
            num_local_experts=16,
            intermediate_size=8192,
            num_experts_per_tok=1,
            num_hidden_layers=48,
        ),
        f"Llama4TextConfig, {_DEFAULTS}",
    ),
    "minimax-m2": (
        dict(
            model_type="minimax_m2",
            hidden_size=3072,
            num_local_experts=256,
            intermediate_size=1536,
            num_experts_per_tok=8,
            num_hidden_layers=62,
        ),
        f"MiniMaxM2Config, {_DEFAULTS}",
    ),
    "ernie-4.5-21b-a3b": (
        dict(
            model_type="ernie4_5_moe",
            hidden_size=2560,
            moe_num_experts=64,
            moe_intermediate_size=1536,
            moe_k=6,
            moe_num_shared_experts=2,
            num_hidden_layers=28,
            moe_layer_start_index=1,
        ),
        f"Ernie4_5_MoeConfig, {_DEFAULTS}",
    ),
    "phi-3.5-moe": (
        dict(
            model_type="phimoe", hidden_size=4096, num_local_experts=16, intermediate_size=6400, num_experts_per_tok=2, num_hidden_layers=32
        ),
        f"PhimoeConfig, {_DEFAULTS}",
    ),
    "mistral-4": (
        dict(
            model_type="mistral4",
            hidden_size=4096,
            n_routed_experts=128,
            moe_intermediate_size=2048,
            num_experts_per_tok=4,
            n_shared_experts=1,
            num_hidden_layers=36,
        ),
        f"Mistral4Config, {_DEFAULTS}",
    ),
}
