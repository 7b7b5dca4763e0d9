"""Pad the intermediate and the hidden size of canonical experts with zeros, for a kernel that wants multiples.

experts(x [T, H], ids, weights, w13 [E, 2D, H], w2 [E, H, D])
    ->  slice(experts(pad(x) [T, H'], ids, weights, pad(w13) [E, 2D', H'], pad(w2) [E, H', D']), H)

Exact: a padded column of x meets zero rows of w13, a padded column of the activation meets zero columns of w2. Biases are padded too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from moefx.activation.spec import Activation
from moefx.graph import aten, insert, shape


def run(graph: fx.Graph, nodes: list[fx.Node], sizes: Mapping[str, int]) -> list[fx.Node]:
    """Rewrite `graph` in place; `sizes` gives the padded "D" and "H". Returns the padded experts calls."""
    return [_pad(graph, node, sizes) for node in nodes]


def _pad(graph: fx.Graph, node: fx.Node, sizes: Mapping[str, int]) -> fx.Node:
    x, ids, weights, w13, b13, w2, b2, code, *first = node.args
    assert isinstance(w2, fx.Node) and isinstance(code, str)
    experts, hidden, width = shape(w2) or (0, 0, 0)
    extra_h, extra_d = sizes.get("H", hidden) - hidden, sizes.get("D", width) - width
    act = Activation.decode(code)
    with graph.inserting_before(node):
        x = _zeros(graph, x, (0, extra_h), node)
        w13 = _rows(graph, _zeros(graph, w13, (0, extra_h), node), act, experts, width, extra_d, node)
        b13 = _rows(graph, b13, act, experts, width, extra_d, node) if b13 is not None else None
        w2 = _zeros(graph, w2, (0, extra_d, 0, extra_h), node)
        b2 = _zeros(graph, b2, (0, extra_h), node) if b2 is not None else None
        new = insert(graph, node.target, (x, ids, weights, w13, b13, w2, b2, code, *first), node)
        result = insert(graph, aten.slice.Tensor, (new, 1, 0, hidden), node) if extra_h else new
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    return new


def _rows(graph: fx.Graph, rows: Any, act: Activation, experts: int, width: int, extra: int, like: fx.Node) -> fx.Node:
    """Rows [E, 2D, ..] -> [E, 2D', ..]: concatenated halves are padded each, interleaved pairs and ungated rows at the end."""
    tail = list((shape(rows) or ())[2:])
    behind = (0, 0) * len(tail)
    if not act.gated:
        return _zeros(graph, rows, (*behind, 0, extra), like)
    if act.columns.startswith("interleaved"):
        return _zeros(graph, rows, (*behind, 0, 2 * extra), like)
    halves = insert(graph, aten.reshape.default, (rows, [experts, 2, width, *tail]), like)
    halves = _zeros(graph, halves, (*behind, 0, extra), like)
    return insert(graph, aten.reshape.default, (halves, [experts, 2 * (width + extra), *tail]), like)


def _zeros(graph: fx.Graph, node: Any, pads: tuple[int, ...], like: fx.Node) -> fx.Node:
    return insert(graph, aten.constant_pad_nd.default, (node, list(pads), 0.0), like) if any(pads) else node
