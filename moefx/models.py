"""Built-in model sizes for `moefx plan NAME`: the bf16 checkpoints, sizes only, each with the source of its numbers.

A source is a config class of transformers 5.24 whose defaults are the model's, or a public file: an address, or repository: path.
"""

from __future__ import annotations

from typing import Any

_HUB = "https://huggingface.co/"
_MAXTEXT = "AI-Hypercomputer/maxtext: src/maxtext/configs/models/"
_MAXTEXT_OLD = "AI-Hypercomputer/maxtext: src/MaxText/configs/models/"
_DYNAMO = "ai-dynamo/aiconfigurator: src/aiconfigurator/model_configs/"
_DYNAMO_CORE = "ai-dynamo/aiconfigurator: aic-core/src/aiconfigurator_core/model_configs/"
_SLIME = "THUDM/slime: scripts/models/"
_DEFAULTS = ", defaults of transformers 5.24's config class"

# How the families spell experts, experts a token and the experts' width.
_NUM = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_ROUTED = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
_LOCAL = ("num_local_experts", "num_experts_per_tok", "intermediate_size")
_SPELLINGS = {
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "hy_v3", "laguna", "zaya"), _NUM),
    **dict.fromkeys(("mixtral", "gpt_oss", "llama4_text", "minimax_m2", "minimax_m3_vl_text", "phimoe", "granitemoe"), _LOCAL),
    "olmoe": ("num_experts", "num_experts_per_tok", "intermediate_size"),
    "jamba": ("num_experts", "num_experts_per_tok", "intermediate_size"),
    "hunyuan_v1_moe": ("num_experts", "moe_topk", "intermediate_size"),
    "ernie4_5_moe": ("moe_num_experts", "moe_k", "moe_intermediate_size"),
    "kimi_linear": ("num_experts", "num_experts_per_token", "moe_intermediate_size"),
    "bailing_hybrid": ("num_experts", "num_experts_per_token", "moe_intermediate_size"),
    "gemma4_text": ("num_experts", "top_k_experts", "moe_intermediate_size"),
}


def _sizes(
    model_type: str, layers: int, hidden: int, experts: int, top_k: int, width: int, source: str, **more: Any
) -> tuple[dict[str, Any], str]:
    """One model. `more` is what else its family reads: shared experts, which layers are dense, an activation."""
    spelled = dict(zip(_SPELLINGS.get(model_type, _ROUTED), (experts, top_k, width), strict=True))
    return {"model_type": model_type, "num_hidden_layers": layers, "hidden_size": hidden, **spelled, **more}, source


def _routed(
    model_type: str, layers: int, hidden: int, experts: int, top_k: int, width: int, dense: int, shared: int, source: str, **more: Any
) -> tuple[dict[str, Any], str]:
    """One model of a DeepSeek-like family: its first `dense` layers have no experts, `shared` shared experts are as wide as the others."""
    keys = {"first_k_dense_replace": dense, "n_shared_experts": shared}
    return _sizes(model_type, layers, hidden, experts, top_k, width, source, **keys, **more)


BUILT_IN: dict[str, tuple[dict[str, Any], str]] = {
    # name: family, layers, hidden size, experts, experts a token, width of an expert, source, what else the family reads
    "qwen1.5-moe-a2.7b": _sizes("qwen2_moe", 24, 2048, 60, 4, 1408, "Qwen2MoeConfig" + _DEFAULTS, shared_expert_intermediate_size=5632),
    "qwen2-57b-a14b": _sizes(
        "qwen2_moe",
        28,
        3584,
        64,
        8,
        2560,
        _HUB + "shuyuej/Qwen2-57B-A14B-GPTQ/blob/main/config.json",
        shared_expert_intermediate_size=20480,
    ),
    "qwen3-30b-a3b": _sizes("qwen3_moe", 48, 2048, 128, 8, 768, _MAXTEXT_OLD + "qwen3-30b-a3b.yml"),
    "qwen3-235b-a22b": _sizes("qwen3_moe", 94, 4096, 128, 8, 1536, _MAXTEXT_OLD + "qwen3-235b-a22b.yml"),
    "qwen3-coder-480b-a35b": _sizes("qwen3_moe", 62, 6144, 160, 8, 2560, _MAXTEXT_OLD + "qwen3-480b-a35b.yml"),
    "qwen3-next-80b-a3b": _sizes("qwen3_next", 48, 2048, 512, 10, 512, "Qwen3NextConfig" + _DEFAULTS, shared_expert_intermediate_size=512),
    "qwen3.5-35b-a3b": _sizes(
        "qwen3_5_moe", 40, 2048, 256, 8, 512, "Qwen3_5MoeTextConfig" + _DEFAULTS, shared_expert_intermediate_size=512
    ),
    "qwen3.5-397b-a17b": _sizes(
        "qwen3_5_moe", 60, 4096, 512, 10, 1024, _DYNAMO + "Qwen--Qwen3.5-397B-A17B_config.json", shared_expert_intermediate_size=1024
    ),
    "mixtral-8x7b": _sizes("mixtral", 32, 4096, 8, 2, 14336, "MixtralConfig" + _DEFAULTS),
    "mixtral-8x22b": _sizes("mixtral", 56, 6144, 8, 2, 16384, _MAXTEXT + "mixtral-8x22b.yml"),
    "mistral-4": _routed("mistral4", 36, 4096, 128, 4, 2048, 0, 1, "Mistral4Config" + _DEFAULTS),
    "deepseek-v2": _routed("deepseek_v2", 60, 5120, 160, 6, 1536, 1, 2, _MAXTEXT + "deepseek2-236b.yml"),
    "deepseek-v2-lite": _routed("deepseek_v2", 27, 2048, 64, 6, 1408, 1, 2, _MAXTEXT + "deepseek2-16b.yml"),
    "deepseek-v3": _routed("deepseek_v3", 61, 7168, 256, 8, 2048, 3, 1, "DeepseekV3Config" + _DEFAULTS),
    "deepseek-v3.2": _routed("deepseek_v32", 61, 7168, 256, 8, 2048, 3, 1, "DeepseekV32Config" + _DEFAULTS),
    "deepseek-v4-flash": _sizes(
        "deepseek_v4", 43, 4096, 256, 6, 2048, "DeepseekV4Config" + _DEFAULTS, n_shared_experts=1, swiglu_limit=10.0
    ),
    "deepseek-v4-pro": _sizes(
        "deepseek_v4",
        61,
        7168,
        384,
        6,
        3072,
        _DYNAMO_CORE + "nvidia--DeepSeek-V4-Pro-NVFP4_config.json",
        n_shared_experts=1,
        swiglu_limit=10.0,
    ),
    "kimi-k2": _routed("kimi_k2", 61, 7168, 384, 8, 2048, 1, 1, _DYNAMO + "moonshotai--Kimi-K2-Instruct_config.json"),
    "kimi-linear-48b-a3b": _sizes(
        "kimi_linear", 27, 2304, 256, 8, 1024, "KimiLinearConfig" + _DEFAULTS, first_k_dense_replace=1, num_shared_experts=1
    ),
    "moonlight-16b-a3b": _routed("deepseek_v3", 27, 2048, 64, 6, 1408, 1, 2, "zyzshishui/slime: scripts/models/moonlight.sh"),
    "glm-4.5": _routed("glm4_moe", 92, 5120, 160, 8, 1536, 3, 1, "pufanyi/Megatron-Bridge: docs/models/llm/glm45.md"),
    "glm-4.5-air": _routed("glm4_moe", 46, 4096, 128, 8, 1408, 1, 1, "Glm4MoeConfig" + _DEFAULTS),
    "glm-4.6": _routed(
        "glm4_moe",
        92,
        5120,
        160,
        8,
        1536,
        3,
        1,
        "https://ollama.com/MichelRosselli/GLM-4.6:latest/blobs/579108167db6 (93 blocks, 1 of them for multi-token prediction)",
    ),
    "glm-4.7": _routed("glm4_moe", 92, 5120, 160, 8, 1536, 3, 1, _HUB + "zai-org/GLM-4.7/blob/refs%2Fpr%2F49/config.json"),
    "glm-4.7-flash": _routed("glm4_moe_lite", 47, 2048, 64, 4, 1536, 1, 1, "Glm4MoeLiteConfig" + _DEFAULTS),
    "glm-5": _routed("glm_moe_dsa", 78, 6144, 256, 8, 2048, 3, 1, "GlmMoeDsaConfig" + _DEFAULTS),
    "glm-5.1": _routed("glm_moe_dsa", 78, 6144, 256, 8, 2048, 3, 1, _MAXTEXT + "glm5.1-744b.yml"),
    "gpt-oss-20b": _sizes("gpt_oss", 24, 2880, 32, 4, 2880, _MAXTEXT + "gpt-oss-20b.yml"),
    "gpt-oss-120b": _sizes("gpt_oss", 36, 2880, 128, 4, 2880, "GptOssConfig" + _DEFAULTS),
    "llama-4-scout": _sizes("llama4_text", 48, 5120, 16, 1, 8192, "Llama4TextConfig" + _DEFAULTS),
    "llama-4-maverick": _sizes(
        "llama4_text",
        48,
        5120,
        128,
        1,
        8192,
        _DYNAMO_CORE + "meta-llama--Llama-4-Maverick-17B-128E-Instruct_config.json",
        interleave_moe_layer_step=2,
    ),
    "minimax-m2": _sizes("minimax_m2", 62, 3072, 256, 8, 1536, "MiniMaxM2Config" + _DEFAULTS),
    "minimax-m3": _sizes(
        "minimax_m3_vl_text",
        60,
        6144,
        128,
        4,
        3072,
        "MiniMaxM3VLTextConfig of transformers 5.24; 3 dense layers from "
        "https://docs.nvidia.com/nemo/megatron-bridge/nightly/apidocs/bridge/bridge.recipes.minimax.h100.minimax_m3.html",
        shared_intermediate_size=3072,
        swiglu_limit=7.0,
        moe_layer_freq=[0] * 3 + [1] * 57,
    ),
    "hunyuan-large": _sizes(
        "hunyuan_v1_moe",
        64,
        6400,
        16,
        1,
        18304,
        _HUB + "tencent/Tencent-Hunyuan-Large/blame/e264dea96ac935475166a9060b6fff94691de97e/config.json",
    ),
    "hy3-preview": _sizes("hy_v3", 80, 4096, 192, 8, 1536, "HYV3Config" + _DEFAULTS, num_shared_experts=1),
    "ernie-4.5-21b-a3b": _sizes(
        "ernie4_5_moe", 28, 2560, 64, 6, 1536, "Ernie4_5_MoeConfig" + _DEFAULTS, moe_num_shared_experts=2, moe_layer_start_index=1
    ),
    "olmoe-1b-7b": _sizes(
        "olmoe",
        16,
        2048,
        64,
        8,
        1024,
        _HUB + "interview-eval/olmoe-math-train-gsm8k-2/blame/main/config.json (a fine-tune of OLMoE-1B-7B-0924)",
    ),
    "phi-3.5-moe": _sizes("phimoe", 32, 4096, 16, 2, 6400, "PhimoeConfig" + _DEFAULTS),
    "granite-3.0-3b-a800m": _sizes(
        "granitemoe", 32, 1536, 40, 8, 512, _HUB + "ibm-granite/granite-3.0-3b-a800m-instruct/blob/main/config.json"
    ),
    "granite-3.1-1b-a400m": _sizes(
        "granitemoe", 24, 1024, 32, 8, 512, _HUB + "ibm-granite/granite-3.1-1b-a400m-base/blob/main/config.json"
    ),
    "gemma-4-26b-a4b": _sizes(
        "gemma4_text", 30, 2816, 128, 8, 704, _SLIME + "gemma4-26B-A4B.sh", enable_moe_block=True, hidden_activation="gelu_pytorch_tanh"
    ),
    "nemotron-3-nano-30b-a3b": _sizes(
        "nemotron_h",
        52,
        2688,
        128,
        6,
        1856,
        _SLIME + "nemotron-nano-30B-A3B.sh",
        moe_shared_expert_intermediate_size=3712,
        hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    ),
    "step-3.7-flash": _sizes(
        "step3p5",
        45,
        4096,
        288,
        8,
        1280,
        "Step3p7TextConfig of transformers 5.24; the clamps of its last two layers from the comments of modeling_step3p7.py",
        share_expert_dim=1280,
        swiglu_limits=[0.0] * 43 + [7.0] * 2,
        swiglu_limits_shared=[0.0] * 43 + [16.0] * 2,
    ),
    "mimo-v2-flash": _sizes("mimo_v2_flash", 48, 4096, 256, 8, 2048, "MiMoV2FlashConfig" + _DEFAULTS),
    "laguna-xs.2": _sizes("laguna", 40, 2048, 256, 8, 512, "LagunaConfig" + _DEFAULTS, shared_expert_intermediate_size=512),
    "laguna-s-2.1": _sizes(
        "laguna", 48, 3072, 256, 10, 1024, _DYNAMO_CORE + "poolside--Laguna-S-2.1-FP8_config.json", shared_expert_intermediate_size=1024
    ),
    "ling-3.0-flash": _sizes(
        "bailing_hybrid", 42, 2560, 512, 8, 768, "BailingHybridConfig" + _DEFAULTS, first_k_dense_replace=2, num_shared_experts=1
    ),
    "solar-open-100b": _sizes("solar_open", 48, 4096, 128, 8, 1280, "SolarOpenConfig" + _DEFAULTS, n_shared_experts=1),
    "jamba-v0.1": _sizes("jamba", 32, 4096, 16, 2, 14336, "JambaConfig" + _DEFAULTS, expert_layer_period=2, expert_layer_offset=1),
    "zaya1-8b": _sizes("zaya", 40, 2048, 16, 1, 2048, "ZayaConfig" + _DEFAULTS),
}
