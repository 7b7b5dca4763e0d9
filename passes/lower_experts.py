"""Lower canonical experts to the kernel the plan chose.

experts(x, ids, weights, w13, b13, w2, b2; swiglu, first)
    ->  %p = kernel.pack(w13, b13, w2, b2; swiglu), kernel.op(x, ids, weights, *%p; swiglu, first)
    ->  %p, %q = packs of both kernels, guarded("T <= 64", kernel, otherwise, x, ids, weights, [*%p, *%q]; swiglu, first)
experts(..., cat(w13, s13), None, cat(w2, s2), None; ...)
    ->  %p = kernel.pack([w13, s13], None, [w2, s2], None; swiglu), ...    where the kernel joins
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from moefx.graph import aten, dtype, insert, is_call, shape
from moefx.kernels.base import Kernel, guarded


def run(
    graph: fx.Graph, nodes: list[fx.Node], kernel: Kernel, reference: bool = False, guard: str = "", otherwise: Kernel | None = None
) -> None:
    """Rewrite `graph` in place; `reference` takes the kernel's plain-PyTorch reference for its op (to check the kernel against).

    With a `guard` on T, both kernels are packed and the guard chooses at run time.
    """
    for node in nodes:
        x, ids, weights, w13, b13, w2, b2, activation = node.args[:8]
        first = node.args[8] if len(node.args) > 8 else 0
        with graph.inserting_before(node):
            parts = _packed(graph, kernel, (w13, b13, w2, b2, activation), node)
            if guard and otherwise is not None and not reference:
                more = _packed(graph, otherwise, (w13, b13, w2, b2, activation), node)
                head = (guard, kernel.name, otherwise.name, len(parts))
                new = graph.call_function(guarded, (*head, x, ids, weights, [*parts, *more], activation, first))
            else:
                new = graph.call_function(kernel.reference if reference else kernel.op, (x, ids, weights, *parts, activation, first))
            new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    graph.eliminate_dead_code()
    graph.lint()


def _packed(graph: fx.Graph, kernel: Kernel, weights: tuple[Any, ...], like: fx.Node) -> list[fx.Node | None]:
    *tensors, activation = weights
    given = _unjoined(tuple(tensors)) if kernel.joins else tensors
    pack = insert(graph, kernel.pack, (*given, activation), like)
    return [insert(graph, operator.getitem, (pack, i), like) if v is not None else None for i, v in enumerate(pack.meta["val"])]


def _unjoined(weights: tuple[Any, ...]) -> tuple[Any, ...]:
    """What (w13, b13, w2, b2) are joined from along the experts, where all have parts of as many; else the weights."""
    given = [w for w in weights if w is not None]
    if not all(is_call(w, {aten.cat.default}) and w.args[1:] in ((), (0,)) for w in given):
        return weights
    rows = {tuple((shape(part) or ())[0] for part in w.args[0]) for w in given}
    if len(rows) > 1 or any(len({dtype(part) for part in w.args[0]}) > 1 for w in given):
        return weights
    return tuple(None if w is None else list(w.args[0]) for w in weights)
