"""`moefx.plan`: the decisions of `optimize` without weights and without running anything."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moefx import checkpoint, hf_config
from moefx.decision import decide
from moefx.layer import Layer
from moefx.models import BUILT_IN
from moefx.options import A2A, PRECISIONS, TARGETS, Options, check_choice, check_disable, check_ep_size, resolve_a2a
from moefx.reports import LayerRecord, Report


def plan(
    model_or_config: Any,
    ep_size: int = 1,
    a2a: str = "auto",
    target: str | None = None,
    precision: str = "preserve",
    tokens: int | None = None,
    disable: Sequence[str] = (),
) -> Report:
    """What moefx would do, as a `Report`.

    model_or_config: a built-in name, the path of a config.json or checkpoint folder, a Hugging Face config (object or dict), or an
    `nn.Module` (meta tensors too: it is traced, not run). target: by default "cpu", or where the module is. tokens: a known number of
    tokens a call. Raises TypeError and ValueError that name the value and the remedy.
    """
    check_ep_size(ep_size)
    check_choice("a2a", a2a, A2A)
    check_choice("precision", precision, PRECISIONS)
    if target is not None:
        check_choice("target", target, TARGETS)
    if tokens is not None and (not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 0):
        raise ValueError(f"tokens={tokens!r} must be an integer of at least 0: the tokens of one call")
    options = Options(ep_size, resolve_a2a(a2a, ep_size, False), precision, target or "cpu", check_disable(disable), tokens=tokens)
    if isinstance(model_or_config, (str, Path)):
        name, config = _named(model_or_config)
        layers = hf_config.layers(config)
        if Path(name).is_dir():
            layers = checkpoint.refine(layers, checkpoint.headers(Path(name)), _depth(config))
        return _from_layers(name, layers, options)
    if isinstance(model_or_config, dict):
        return _from_layers(str(model_or_config.get("model_type", "config")), hf_config.layers(model_or_config), options)
    if hasattr(model_or_config, "named_modules"):
        return _from_module(model_or_config, options, target)
    if hasattr(model_or_config, "to_dict"):
        config = model_or_config.to_dict()
        return _from_layers(str(config.get("model_type", "config")), hf_config.layers(config), options)
    raise TypeError(f"moefx.plan expects a name, a path, a config or a torch.nn.Module, got {type(model_or_config).__name__}")


def _depth(config: dict[str, Any]) -> int | None:
    """The number of decoder layers, where the config says it."""
    inner = config.get("text_config")
    found = (inner if isinstance(inner, dict) else config).get("num_hidden_layers")
    return found if isinstance(found, int) else None


def _named(name: str | Path) -> tuple[str, dict[str, Any]]:
    key = str(name).lower()
    if key in BUILT_IN:
        return key, BUILT_IN[key][0]
    path = Path(name)
    if path.exists() or path.suffix == ".json" or "/" in str(name):
        return str(name), hf_config.read(path)
    near = difflib.get_close_matches(key, BUILT_IN, n=3, cutoff=0.4) or sorted(BUILT_IN)
    raise ValueError(f"{name!r} is no built-in model and no path; did you mean {', '.join(near)}?")


def _from_layers(name: str, layers: Sequence[Layer], options: Options) -> Report:
    records = [_record(layer, options) for layer in layers]
    skipped = [] if records else [{"name": name, "reason": "the config describes no mixture-of-experts layer"}]
    return Report(options, records, skipped, name)


def _record(layer: Layer, options: Options) -> LayerRecord:
    decision = decide(layer, options)
    if layer.form == "dense" and layer.shared_why_unfused is not None:
        return LayerRecord(layer.name, False, layer.form, layer.shared_why_unfused, layer, decision)
    return LayerRecord(layer.name, decision.kernel is not None, layer.form, decision.reason, layer, decision)


def _from_module(model: Any, options: Options, target: str | None) -> Report:
    from dataclasses import replace

    from moefx.pipeline import target_of, trace_layers

    if target is None:
        options = replace(options, target=target_of(model))
    records = trace_layers(model, options)
    skipped = [] if records else [{"name": type(model).__name__, "reason": "no mixture-of-experts layer was found"}]
    return Report(options, records, skipped, type(model).__name__)
