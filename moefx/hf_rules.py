"""Which layers of a model have experts, from its config: the conditions in the decoder layers of transformers 5.24."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

LAYERS = ("num_hidden_layers", "n_layers", "num_layers")
# model_types whose text config class has another name.
CLASS_OF = {"kimi_k2": "deepseek_v3", "step3p7": "step3p5", "qwen3_omni_moe_thinker": "qwen3_omni_moe_text"}


class Keys:
    """The values of one config. What the file leaves out is what the config class of transformers fills in, asked only then."""

    def __init__(self, values: Mapping[str, Any], model_type: str) -> None:
        self.values, self.model_type = values, model_type

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of these that the config has; "a.b" is b inside a, "a.0" the first of a list."""
        for name in names:
            value = _at_path(self.values, name)
            if value is not None:
                return value
        return default

    def need(self, *names: str) -> Any:
        """The first of these that the config or its class has; ValueError names them all."""
        value = self.get(*names)
        if value is not None:
            return value
        defaults = _class_defaults(CLASS_OF.get(self.model_type, self.model_type))
        for name in names:
            value = _at_path(defaults or {}, name)
            if value is not None:
                return value
        reason = "" if defaults is not None else "; transformers, whose config class has the default, does not know it or is not installed"
        raise ValueError(f"the {self.model_type} config has none of {', '.join(names)}{reason}")

    @property
    def depth(self) -> int:
        return int(self.need(*LAYERS))


def _at_path(values: Any, path: str) -> Any:
    for step in path.split("."):
        if isinstance(values, Mapping):
            values = values.get(step)
        elif isinstance(values, (list, tuple)) and step.isdigit() and int(step) < len(values):
            values = values[int(step)]
        else:
            return None
    return values


@functools.cache
def _class_defaults(model_type: str) -> Mapping[str, Any] | None:
    """The defaults of the config class of this model_type, None where transformers or the class is missing. The import is slow."""
    try:
        from transformers import AutoConfig

        found = AutoConfig.for_model(model_type).to_dict()
    except (ImportError, ValueError):
        return None
    inner = found.get("text_config")
    return inner if isinstance(inner, dict) else found


Rule = Callable[[Keys], Sequence[int]]


def every(keys: Keys) -> Sequence[int]:
    """All layers."""
    return range(keys.depth)


def after(default: int, *names: str) -> Rule:
    """All but the first few layers; `names` are where their number is, `default` is the config class's."""
    return lambda keys: range(int(keys.get(*names, default=default)), keys.depth)


def listed(otherwise: Rule) -> Rule:
    """The layers that `mlp_layer_types` does not call dense."""

    def rule(keys: Keys) -> Sequence[int]:
        kinds = keys.get("mlp_layer_types")
        if kinds is None:
            return otherwise(keys)
        return [i for i, kind in enumerate(kinds[: keys.depth]) if kind != "dense"]

    return rule


def every_nth(dense: Sequence[int] = ()) -> Rule:
    """Layers i with (i + 1) divisible by `decoder_sparse_step` that `mlp_only_layers` does not name."""

    def rule(keys: Keys) -> Sequence[int]:
        step, only = int(keys.get("decoder_sparse_step", default=1)), keys.get("mlp_only_layers", default=dense)
        return [i for i in range(keys.depth) if (i + 1) % step == 0 and i not in only]

    return rule


def by_frequency(first: int) -> Rule:
    """From `first_k_dense_replace` on, layers that `moe_layer_freq` (a step, or one flag a layer) picks."""

    def rule(keys: Keys) -> Sequence[int]:
        start, freq = int(keys.get("first_k_dense_replace", default=first)), keys.get("moe_layer_freq", default=1)
        picks = (lambda i: bool(freq[i])) if isinstance(freq, (list, tuple)) else (lambda i: i % int(freq) == 0)
        return [i for i in range(start, keys.depth) if picks(i)]

    return rule


def ernie(keys: Keys) -> Sequence[int]:
    step, start = int(keys.get("moe_layer_interval", default=1)), int(keys.get("moe_layer_start_index", default=1))
    end = int(keys.get("moe_layer_end_index", default=-1))
    last = keys.depth - 1 if end == -1 else end
    return [i for i in range(keys.depth) if (i + 1) % step == 0 and start <= i <= last]


def jamba(keys: Keys) -> Sequence[int]:
    period, offset = int(keys.get("expert_layer_period", default=2)), int(keys.get("expert_layer_offset", default=1))
    return [i for i in range(keys.depth) if i % period == offset]


def llama4(keys: Keys) -> Sequence[int]:
    step, named = int(keys.get("interleave_moe_layer_step", default=1)), keys.get("moe_layers")
    return range(step - 1, keys.depth, step) if named is None else [i for i in range(keys.depth) if i in named]


def minimax_m3(keys: Keys) -> Sequence[int]:
    flags = keys.get("moe_layer_freq")
    return range(keys.depth) if flags is None else [i for i, flag in enumerate(flags[: keys.depth]) if flag]


def nemotron(keys: Keys) -> Sequence[int]:
    """A pattern has one letter a block ("E" is a mixture of experts), newer configs one word."""
    pattern = keys.get("hybrid_override_pattern") or keys.need("layers_block_type", "layer_types")
    return [i for i, kind in enumerate(pattern) if kind in ("E", "moe")]


def step3(keys: Keys) -> Sequence[int]:
    named = keys.get("moe_layers_enum")
    if named is None:
        return range(3, keys.depth)
    picked = {int(i) for i in (named.split(",") if isinstance(named, str) else named) if str(i).strip()}
    return [i for i in range(keys.depth) if i in picked]


def only_if(flag: str, rule: Rule) -> Rule:
    """The rule of a family that is dense unless `flag` is set."""
    return lambda keys: rule(keys) if keys.get(flag) else ()


def nllb(side: str) -> Rule:
    def rule(keys: Keys) -> Sequence[int]:
        step = int(keys.need(f"{side}_sparse_step"))
        return [i for i in range(int(keys.need(f"{side}_layers"))) if step > 0 and (i + 1) % step == 0]

    return rule


def switch(side: str, depth: str) -> Rule:
    def rule(keys: Keys) -> Sequence[int]:
        total, sparse = int(keys.need(depth, "num_layers")), int(keys.need(f"num_sparse_{side}_layers"))
        step = total // sparse if sparse > 0 else 0
        return [i for i in range(total) if step == 1 or (step > 1 and i % step == 1)]

    return rule
