"""A second opinion that shares nothing with the algebra: run the region and the named formula on numbers.

Random columns around every size of number, in float64 with the region's casts left out (agreement to 1e-9), and extreme values in the
region's own dtype: x * exp(x) / (1 + exp(x)) is silu on paper and NaN from 89 on in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from moefx.activation.pull import concrete, concrete_shape, region_nodes
from moefx.activation.spec import Activation
from moefx.graph import aten, features, value

_EXTREMES = (0.0, 1e-3, 3.0, 20.0, 90.0, 1e4, -1e-3, -3.0, -20.0, -90.0, -1e4)
_SHAPED = {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default}


def extremes_differ(activation: Activation, output: fx.Node, leaves: Sequence[fx.Node]) -> str | None:
    """None when region and formula agree; else a sentence that names the inputs they differ at."""
    generator = torch.Generator().manual_seed(0)
    normal = [torch.randn(*concrete_shape(leaf), generator=generator, dtype=torch.float64) for leaf in leaves]
    for scale in (0.1, 1.0, 4.0, abs(activation.limit or 1.0) * 2):
        inputs = [x * scale for x in normal]
        got, want = _run(output, dict(zip(leaves, inputs, strict=True)), exact=True), _formula(activation, leaves, inputs)
        if got is not None and not torch.allclose(
            got.reshape(-1)[: want.numel()], want.reshape(-1)[: got.numel()], rtol=1e-6, atol=1e-9 * scale
        ):
            return f"the region and the formula {activation.kind} differ on random values of size {scale:g}"
    dtype = value(leaves[0]).dtype
    for x in _EXTREMES:
        inputs = [torch.full(concrete_shape(leaf), x, dtype=dtype) for leaf in leaves]
        got, want = _run(output, dict(zip(leaves, inputs, strict=True)), exact=False), _formula(activation, leaves, inputs)
        if got is not None and bool(got.double().reshape(-1)[0].isfinite() != want.double().reshape(-1)[0].isfinite()):
            return f"the region and the formula {activation.kind} differ at {x:g} in {str(dtype).removeprefix('torch.')}: one overflows"
    return None


def _formula(activation: Activation, leaves: Sequence[fx.Node], inputs: list[torch.Tensor]) -> torch.Tensor:
    rows = [x.reshape(-1, features(leaf)) for leaf, x in zip(leaves, inputs, strict=True)]
    return activation(rows[0] if len(rows) == 1 else torch.cat(rows, -1))


def _run(output: fx.Node, known: dict[fx.Node, torch.Tensor], exact: bool) -> torch.Tensor | None:
    """The region on numbers, with one token; None where it reads sizes in a way that can't be replayed."""
    env: dict[fx.Node, Any] = dict(known)
    for node in region_nodes(output, list(known)):
        val = value(node)
        if isinstance(val, (int, torch.SymInt)):
            env[node] = concrete(val)
            continue
        if node.op == "get_attr":
            env[node] = getattr(node.graph.owning_module, str(node.target))
            continue
        if node.op != "call_function":
            return None
        if exact and node.target is aten._to_copy.default:
            env[node] = env[node.args[0]]
            continue
        if node.target in _SHAPED:
            source = env[node.args[0]]
            env[node] = source.expand(concrete_shape(node)) if node.target is aten.expand.default else source.reshape(concrete_shape(node))
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        result = node.target(*args, **kwargs)
        env[node] = result
    return env[output]
