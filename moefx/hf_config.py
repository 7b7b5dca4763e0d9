"""A Hugging Face config (dict) -> the layers `plan` decides on. What differs between families is the table of hf_families."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moefx.activation.spec import Activation
from moefx.hf_families import EXPERTS, FAMILIES, Family
from moefx.hf_rules import Keys
from moefx.layer import Layer, Shared

# Where a wrapper keeps the configs of its language models.
_INNER = ("text_config", "language_config", "llm_config", "thinker_config", "talker_config")
_GATED_KINDS = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh"}
_UNGATED_KINDS = {"relu2": "relu2", "silu": "silu", "swish": "silu"}


def read(path: Path) -> dict[str, Any]:
    """The config of a config.json or of a checkpoint folder; ValueError names what is missing."""
    file = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(
            f"{file} does not exist; pass a config.json, a checkpoint folder with one, or a built-in name (moefx plan --list)"
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds a {type(found).__name__}, expected a JSON object")
    return found


def layers(config: Mapping[str, Any]) -> list[Layer]:
    """One Layer for each kind of MoE layer; `count` is how many the model has. ValueError when the family or a size is unknown."""
    counts: dict[Layer, int] = {}
    try:
        for inner, model_type in _language_models(config, ""):
            for layer in _each_layer(inner, config, model_type):
                _check(layer)
                counts[layer] = counts.get(layer, 0) + 1
    except (AttributeError, TypeError, IndexError) as error:
        raise ValueError(f"the config has a value of another kind than its key takes: {error}") from error
    return [replace(layer, count=count) for layer, count in counts.items()]


def _check(layer: Layer) -> None:
    shared = layer.shared.D if layer.shared else 1
    for what, size in (("hidden size", layer.H), ("intermediate size", layer.D), ("shared intermediate size", shared), ("top-k", layer.K)):
        if size < 1:
            raise ValueError(f"the config's {what} is {size}; it must be at least 1")
    if layer.E_total < layer.K:
        raise ValueError(f"the config has {layer.K} experts a token of {layer.E_total} experts; at most all of them can be chosen")


def _language_models(config: Mapping[str, Any], outer_type: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    """The config itself, or those that it wraps, each with its model_type."""
    model_type = str(config.get("model_type") or outer_type)
    wrapped = [config[name] for name in _INNER if isinstance(config.get(name), Mapping)]
    for inner in wrapped:
        # A wrapper of a known family fixes the class of its text config, whatever model_type a checkpoint wrote inside.
        fixed = {"model_type": model_type} if inner is config.get("text_config") and model_type in FAMILIES else {}
        yield from _language_models({**inner, **fixed}, model_type)
    if not wrapped:
        yield config, model_type


def _each_layer(config: Mapping[str, Any], outer: Mapping[str, Any], model_type: str) -> Iterator[Layer]:
    family_name = model_type if model_type in FAMILIES else model_type.removesuffix("_text")
    keys = Keys(config, model_type)
    if family_name not in FAMILIES:
        experts = keys.get(*EXPERTS)
        if not isinstance(experts, int) or experts < 2:
            return
        if not model_type:
            raise ValueError("the config has no model_type, which says how its layers compute")
        raise ValueError(
            f"model_type {model_type!r} is not in moefx's table of families ({', '.join(sorted(FAMILIES))}); "
            "trace the module instead: moefx.plan(model)"
        )
    dtype = str(_of_either(config, outer, "dtype") or _of_either(config, outer, "torch_dtype") or "bfloat16").removeprefix("torch.")
    quantisation = _of_either(config, outer, "quantization_config") or {}
    for family in FAMILIES[family_name]:
        for index in family.layers(keys):
            layer = _layer(keys, family, index, dtype, quantisation)
            if layer is not None:
                yield layer


def _layer(keys: Keys, family: Family, index: int, dtype: str, quantisation: Mapping[str, Any]) -> Layer | None:
    experts = _of_layer(keys.get(*family.experts) if _explicitly_dense(keys, family) else keys.need(*family.experts), index)
    if not experts or experts < 2:
        return None
    hidden = int(keys.need(*family.hidden))
    reads = int(keys.get(family.latent, default=hidden)) if family.latent else hidden
    width = _width(keys, family, index)
    top_k = family.top_k if isinstance(family.top_k, int) else int(_of_layer(keys.need(*family.top_k), index))
    method = quantisation.get("quant_method")
    format_ = dtype if method is None else "float8_e4m3fn" if method == "fp8" else str(method)
    activation = _activation(keys, family, _limit(keys, family, index, "swiglu_limits"))
    projected = "the shared expert reads the hidden states, the experts a projection of them" if reads != hidden else None
    return Layer(
        " ".join(word for word in (keys.model_type, family.part, "layer") if word),
        # The planner leaves a layer alone that is "dense" and carries a reason.
        "dense" if family.why_left_alone else family.form,
        int(experts),
        width,
        reads,
        top_k,
        activation,
        dtype,
        format_,
        family.bias,
        _shared(keys, family, index, width, dtype, format_, quantisation),
        family.why_left_alone or projected or _why_unfused(keys, family, activation),
    )


def _why_unfused(keys: Keys, family: Family, activation: Activation) -> str | None:
    """Why the shared expert cannot become a slot, whatever the kernel."""
    if family.shared is None:
        return None
    if activation.kind == "opaque":
        return "the activation fits no named variant"
    on = family.shared_unfused_by is None or keys.get(family.shared_unfused_by, default=True)
    return family.shared_why_unfused if on else None


def _explicitly_dense(keys: Keys, family: Family) -> bool:
    """A config that has the key of the experts, with nothing in it, is of a dense sibling: no default may fill it in."""
    return any(name in keys.values for name in family.experts)


def _width(keys: Keys, family: Family, index: int) -> int:
    """The experts' intermediate size; with a `dense_intermediate_size` beside it, `intermediate_size` is the experts'."""
    if isinstance(family.width, int):
        return family.width
    if "moe_intermediate_size" in family.width and keys.get("dense_intermediate_size") is not None:
        return int(_of_layer(keys.need("intermediate_size", *family.width), index))
    return int(_of_layer(keys.need(*family.width), index))


def _of_layer(value: Any, index: int) -> Any:
    """Some configs have one number for all layers, some one a layer."""
    return value[index] if isinstance(value, (list, tuple)) and index < len(value) else value


def _limit(keys: Keys, family: Family, index: int, per_layer: str) -> float | None:
    """The clamp of one layer: `swiglu_limit` of the config, or its entry in a list, where 0 means none."""
    if family.clamp is None:
        return None
    limits = keys.get(per_layer)
    found = _of_layer(limits, index) if limits else keys.get("swiglu_limit", default=family.limit)
    return float(found) if found else None


def _activation(keys: Keys, family: Family, limit: float | None) -> Activation:
    gated = family.kind not in _UNGATED_KINDS.values()
    name = keys.get(family.act) if family.act else None
    kind = family.kind if name is None else (_GATED_KINDS if gated else _UNGATED_KINDS).get(str(name), "opaque")
    alpha = float(keys.get("swiglu_alpha", default=family.alpha)) if kind == "swiglu_oai" else family.alpha
    return Activation(kind, family.columns if gated else "concat", limit, family.clamp if limit else None, alpha, family.beta)


def _shared(keys: Keys, family: Family, index: int, width: int, dtype: str, format_: str, quantisation: Mapping[str, Any]) -> Shared | None:
    if family.shared is None:
        return None
    one = int(keys.need(family.shared_width)) if family.shared_width else width
    size = one * int(keys.need(*family.shared_count) if family.shared_count else 1)
    if size == 0:
        return None
    limit = _limit(keys, family, index, "swiglu_limits_shared") if family.shared_clamped else None
    routed = _activation(keys, family, limit)
    activation = replace(routed, columns=family.shared_columns if routed.gated else "concat")
    excluded = any("shared" in str(name) for name in quantisation.get("modules_to_not_convert") or [])
    return Shared(
        size,
        "sigmoid" if family.shared == "sigmoid" else None,
        activation,
        dtype if excluded else format_,
        bool(family.shared_bias and keys.get(family.shared_bias)),
    )


def _of_either(config: Mapping[str, Any], outer: Mapping[str, Any], name: str) -> Any:
    return config.get(name) or outer.get(name)
