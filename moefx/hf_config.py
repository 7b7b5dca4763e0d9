"""A Hugging Face config (dict) -> the layers `plan` decides on. Sizes by their usual keys; what differs between families is one table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moefx.activation.spec import Activation
from moefx.layer import Layer, Shared

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k", "moe_top_k")
_WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size", "ffn_hidden_size")


@dataclass(frozen=True)
class Family:
    """What a config does not say of its family. gate: None or "sigmoid"; shared_keys: where the shared width is; folded: n * D."""

    kind: str = "swiglu"
    columns: str = "concat"
    clamp: str | None = None
    limit: float | None = None
    alpha: float = 1.0
    beta: float = 0.0
    bias: bool = False
    shared: str | None = None  # "sigmoid", "plain" or None
    shared_columns: str = "separate"
    clamp_shared: bool = True
    form: str = "grouped_mm"
    why_left_alone: str | None = None


_PLAIN = Family(shared="plain")
_GATED = Family(shared="sigmoid")
_CLAMPED = Family(shared="plain", clamp="pre", limit=10.0)
FAMILIES: dict[str, Family] = {
    **{
        n: Family()
        for n in (
            "mixtral",
            "minimax",
            "minimax_m2",
            "qwen3_moe",
            "qwen3_vl_moe",
            "olmoe",
            "flex_olmo",
            "phimoe",
            "jamba",
            "granitemoe",
            "lfm2_moe",
        )
    },
    **{n: _GATED for n in ("qwen2_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp")},
    **{
        n: _PLAIN
        for n in (
            "deepseek_v2",
            "deepseek_v3",
            "deepseek_v32",
            "glm4_moe",
            "glm4_moe_lite",
            "glm_moe_dsa",
            "dots1",
            "kimi_k2",
            "kimi_linear",
            "ernie4_5_moe",
            "hunyuan_v1_moe",
            "mistral4",
            "exaone_moe",
            "bailing_hybrid",
            "afmoe",
            "solar_open",
            "hy_v3",
        )
    },
    **{n: _CLAMPED for n in ("deepseek_v4", "glm5_next")},
    "hy_v4": Family(shared="plain", clamp="pre", limit=10.0, clamp_shared=False),
    "gpt_oss": Family("swiglu_oai", "interleaved", "pre", 7.0, 1.702, 1.0, bias=True),
    "minimax_m3_vl": Family("swiglu_oai", "concat", "pre", 7.0, 1.702, 1.0, shared="plain"),
    "nemotron_h": Family("relu2", shared="plain"),
    "gemma4": Family("geglu_tanh"),
    "gemma4_text": Family("geglu_tanh"),
    "llama4_text": Family(shared="plain", form="dense", why_left_alone="router weights multiply the experts' input, not their output"),
}


def read(path: Path) -> dict[str, Any]:
    """The config of a config.json or of a checkpoint folder; ValueError names what is missing."""
    file = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(
            f"{file} does not exist; pass a config.json, a checkpoint folder or a built-in name (moefx plan --list)"
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds a {type(found).__name__}, expected a JSON object")
    return found


def layers(config: Mapping[str, Any]) -> list[Layer]:
    """One Layer for each kind of MoE layer; `count` is how many the model has. ValueError when the family or a size is unknown."""
    outer = config
    config = config.get("text_config") or config
    model_type = str(config.get("model_type") or outer.get("model_type") or "")
    if model_type == "llama4":
        model_type = "llama4_text"
    experts = _first(config, _EXPERTS)
    if not experts or experts < 2:
        return []
    if model_type not in FAMILIES:
        raise ValueError(
            f"model_type {model_type!r} is not in moefx's table of families ({', '.join(sorted(FAMILIES))}); "
            "trace the module instead: moefx.plan(model)"
        )
    family = FAMILIES[model_type]
    hidden, width, top_k = _need(config, ("hidden_size",)), _need(config, _WIDTH), _need(config, _TOP_K)
    dtype = _dtype(config, outer)
    quantised = _is_fp8(config, outer)
    format_ = "float8_e4m3fn" if quantised else dtype
    limit = config.get("swiglu_limit", family.limit) if family.clamp else None
    activation = Activation(family.kind, family.columns, limit, family.clamp if limit else None, family.alpha, family.beta)
    shared = _shared(config, outer, family, activation, width, dtype, format_)
    return [
        Layer(
            f"{model_type} layer",
            family.form,
            experts,
            width,
            hidden,
            top_k,
            activation,
            dtype,
            format_,
            family.bias,
            shared,
            family.why_left_alone,
            _count(config),
        )
    ]


def _shared(
    config: Mapping[str, Any], outer: Mapping[str, Any], family: Family, routed: Activation, width: int, dtype: str, format_: str
) -> Shared | None:
    if family.shared is None:
        return None
    own = _first(
        config, ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size", "share_expert_dim")
    )
    count = _first(config, ("n_shared_experts", "moe_num_shared_experts", "num_shared_expert", "num_shared_experts"))
    if own is None and family.shared == "plain" and not count:
        return None if not str(config.get("model_type")).startswith("llama4") else Shared(width, None, routed, dtype)
    size = own if own is not None else int(count or 1) * width
    if size == 0:
        return None
    clamped = family.clamp_shared
    activation = Activation(
        routed.kind,
        family.shared_columns if routed.gated else "concat",
        routed.limit if clamped else None,
        routed.clamp if clamped else None,
        routed.alpha,
        routed.beta,
    )
    excluded = any("shared" in str(name) for name in _quantisation(config, outer).get("modules_to_not_convert") or [])
    return Shared(size, "sigmoid" if family.shared == "sigmoid" else None, activation, dtype if excluded else format_)


def _count(config: Mapping[str, Any]) -> int:
    total = int(config.get("num_hidden_layers") or 1)
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, list):
        return sum("moe" in str(k) or str(k) == "sparse" for k in kinds)
    step = int(config.get("interleave_moe_layer_step") or config.get("decoder_sparse_step") or config.get("expert_layer_period") or 1)
    first = int(config.get("first_k_dense_replace") or config.get("moe_layer_start_index") or 0)
    dense = len(config.get("mlp_only_layers") or [])
    return max(1, (total - first) // step - dense)


def _quantisation(config: Mapping[str, Any], outer: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("quantization_config") or outer.get("quantization_config") or {}


def _is_fp8(config: Mapping[str, Any], outer: Mapping[str, Any]) -> bool:
    return _quantisation(config, outer).get("quant_method") == "fp8"


def _dtype(config: Mapping[str, Any], outer: Mapping[str, Any]) -> str:
    found = config.get("dtype") or config.get("torch_dtype") or outer.get("dtype") or outer.get("torch_dtype") or "bfloat16"
    return str(found).removeprefix("torch.")


def _first(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    for key in keys:
        value = config.get(key)
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _need(config: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    found = _first(config, keys)
    if found is None:
        raise ValueError(f"the config has none of {', '.join(keys)}")
    return found
