"""What a checkpoint folder says of its experts: names, shapes and dtypes from safetensors headers. No weight is loaded.

The config says how a layer computes; the headers say what is stored: which layers have experts, their sizes, and the storage type of the
routed and of the shared experts (quantisation often leaves the latter out). Where the two disagree on a size, ValueError names both.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moefx.layer import Layer

_DTYPES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "I8": "int8",
    "U8": "uint8",
}
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_ROUTED = re.compile(r"\.experts\.(?:(\d+)\.)?(?:mlp\.)?(down_proj|w2|down|output_linear|fc2)(?:\.weight|_blocks|\.weight_packed)?$")
_SHARED = re.compile(r"\.shared_(?:experts?|mlp)\.(?:\d+\.)?(down_proj|w2|output_linear)(?:\.weight)?$")


@dataclass(frozen=True)
class Stored:
    """One tensor as its header describes it."""

    shape: tuple[int, ...]
    dtype: str


def headers(folder: Path) -> dict[str, Stored]:
    """Every tensor of the folder's *.safetensors; empty where there are none. ValueError for a missing shard or a file of another kind."""
    from safetensors import SafetensorError, safe_open

    _check_shards(folder)
    found: dict[str, Stored] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="np") as tensors:
                for name in tensors.keys():  # noqa: SIM118  the object is no mapping
                    part = tensors.get_slice(name)
                    found[name] = Stored(tuple(part.get_shape()), _DTYPES.get(part.get_dtype(), part.get_dtype().lower()))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is no safetensors file: {error}") from error
    return found


def _check_shards(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    if not index.exists() or not any(folder.glob("*.safetensors")):
        return
    try:
        wanted = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{index} is no index of shards: {error}") from error
    missing = sorted(name for name in wanted if not (folder / name).exists())
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(wanted)} shards are missing in {folder}, {missing[0]} first; download them or pass config.json"
        )


def refine(layers: Sequence[Layer], tensors: Mapping[str, Stored], depth: int | None = None) -> list[Layer]:
    """The config's layers with the stored formats and counts; one Layer for each kind that is stored differently.

    Layers from `depth` on (the model's number of layers) are draft heads. A config with several kinds of layers stays as it is: headers
    do not say which of them a layer is.
    """
    stored = {index: found for index, found in _by_layer(tensors).items() if depth is None or index < depth}
    if len(layers) != 1 or not stored:
        return list(layers)
    found: list[Layer] = []
    for layer in layers:
        kinds: dict[tuple[str, str | None], list[int]] = defaultdict(list)
        for index, (routed, shared) in stored.items():
            _check(layer, routed, shared)
            formats = {tensor.dtype for tensor in routed.values()}
            kinds[formats.pop() if len(formats) == 1 else "mixed", shared[1].dtype if shared else None].append(index)
        for (routed_format, shared_format), indices in kinds.items():
            own = (
                replace(layer.shared, weight_format=shared_format)
                if layer.shared is not None and shared_format is not None
                else layer.shared
            )
            name = layer.name if len(kinds) == 1 else f"{layer.name} ({_spans(indices)})"
            found.append(replace(layer, name=name, weight_format=routed_format, shared=own, count=len(indices)))
    return found


def _by_layer(tensors: Mapping[str, Stored]) -> dict[int, tuple[dict[str, Stored], tuple[str, Stored] | None]]:
    """Layer index -> (down projections of the routed experts by name, that of the shared expert)."""
    routed: dict[str, dict[int, dict[str, Stored]]] = defaultdict(lambda: defaultdict(dict))
    shared: dict[tuple[str, int], tuple[str, Stored]] = {}
    for name, tensor in tensors.items():
        at = _LAYER.search(name)
        if at is None or len(tensor.shape) < 2:
            continue
        stack, index = name[: at.start()], int(at[1])
        if _SHARED.search(name):
            shared[stack, index] = (name, tensor)
        elif _ROUTED.search(name):
            routed[stack][index][name] = tensor
    if not routed:
        return {}
    main = max(routed, key=lambda stack: len(routed[stack]))  # the others are draft heads and towers
    return {index: (routed[main][index], shared.get((main, index))) for index in sorted(routed[main])}


def _check(layer: Layer, routed: Mapping[str, Stored], shared: tuple[str, Stored] | None) -> None:
    name, tensor = next(iter(routed.items()))
    stacked = len(tensor.shape) >= 3
    experts = tensor.shape[0] if stacked else len(routed)
    if experts != layer.E_total:
        raise ValueError(
            f"config.json says {layer.E_total} experts and the checkpoint has {experts} ({name}); one of them is of another model"
        )
    if tensor.dtype in ("uint8", "i32"):  # packed below a byte a weight: the shape is not that of the matrix
        return
    if sorted(tensor.shape[-2:]) != sorted((layer.D, layer.H)):
        sizes = f"D = {layer.D}, H = {layer.H}"
        raise ValueError(f"config.json says {sizes} and the checkpoint's {name} is {list(tensor.shape)}; one of them is of another model")
    if shared is not None and layer.shared is not None and sorted(shared[1].shape[-2:]) != sorted((layer.shared.D, layer.H)):
        sizes = f"a shared expert of {layer.shared.D} over H = {layer.H}"
        raise ValueError(f"config.json says {sizes} and the checkpoint's {shared[0]} is {list(shared[1].shape)}")


def _spans(indices: list[int]) -> str:
    """[3, 4, 5, 9] -> "layers 3..5, 9"."""
    spans: list[list[int]] = []
    for i in indices:
        if spans and i == spans[-1][1] + 1:
            spans[-1][1] = i
        else:
            spans.append([i, i])
    return "layers " + ", ".join(f"{a}..{b}" if a != b else f"{a}" for a, b in spans)
