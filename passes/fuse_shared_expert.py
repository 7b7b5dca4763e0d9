"""Make the shared expert one more slot (or several) of the routed experts.

    add(experts(x, ids, weights, w13, w2), shared_expert(x, gate, s13, s2))
        ->  experts(x, cat(ids, E), cat(weights, gate), cat(w13, s13), cat(w2, s2))

A shared expert of s * D columns becomes s slots: gate and up rows and down columns are cut into s parts; a down bias goes to the first
slot alone. The slot's weight is exactly the gate (1 without one). Only called when the plan proved the placement.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from moefx import ops
from moefx.activation.spec import Activation
from moefx.graph import CASTS, aten, dtype, getitem_source, insert, is_call, shape, through_views
from moefx.passes.raise_experts import Raised
from moefx.passes.raise_shared_expert import RaisedShared


def run(graph: fx.Graph, routed: Raised, shared: RaisedShared) -> fx.Node:
    """Rewrite `graph` in place; returns the `moefx.experts` node that holds the slots."""
    assert shared.node is not None
    slots, like, join = shared.intermediate // routed.intermediate, routed.node, shared.join
    x, ids, weights, w13, b13, w2, b2, code = routed.node.args
    _, gate, s13, sb13, s2, sb2, shared_code = shared.node.args
    with graph.inserting_before(join):
        ids = _no_slot(graph, ids, routed.experts, like)
        slot_ids = [insert(graph, aten.full_like.default, (_column(graph, ids, like), routed.experts + j), like) for j in range(slots)]
        slot_weight = _slot_weight(graph, gate, weights, like)
        new_ids = insert(graph, aten.cat.default, ([ids, *slot_ids], 1), like)
        new_weights = insert(graph, aten.cat.default, ([weights] + [slot_weight] * slots, 1), like)
        slot13 = [_slot_first(graph, s13, j, routed, shared_code, code, like) for j in range(slots)]
        slot2 = [_unsqueeze(graph, _cut(graph, s2, 1, j, routed.intermediate, like), like) for j in range(slots)]
        new13 = insert(graph, aten.cat.default, ([w13, *slot13], 0), like)
        new2 = insert(graph, aten.cat.default, ([w2, *slot2], 0), like)
        newb13 = _slot_bias(
            graph,
            b13,
            [_slot_first(graph, sb13, j, routed, shared_code, code, like) if sb13 is not None else None for j in range(slots)],
            slot13,
            like,
        )
        newb2 = _slot_bias(
            graph, b2, [_unsqueeze(graph, sb2, like) if sb2 is not None and j == 0 else None for j in range(slots)], slot2, like
        )
        node = insert(graph, ops.experts, (x, new_ids, new_weights, new13, newb13, new2, newb2, code), like)
        other = join.args[1] if _comes_from(join.args[0], shared.node) else join.args[0]
        result = _replay_views(graph, other, routed.node, node, like)
    join.replace_all_uses_with(result)
    graph.eliminate_dead_code()
    graph.lint()
    return node


def _no_slot(graph: fx.Graph, ids: Any, experts: int, like: fx.Node) -> fx.Node:
    """Ids from E on, which a model uses for "no expert", must not become the slot's; positions of a top-k over E scores can't be that."""
    source = getitem_source(through_views(ids, CASTS))
    if (
        source is not None
        and source[1] == 1
        and is_call(source[0], {aten.topk.default})
        and (shape(source[0].args[0]) or (0,))[-1] == experts
    ):
        return ids
    return insert(graph, aten.masked_fill.Scalar, (ids, insert(graph, aten.ge.Scalar, (ids, experts), like), -1), like)


def _replay_views(graph: fx.Graph, end: Any, start: fx.Node, new: fx.Node, like: fx.Node) -> fx.Node:
    """The views that led from `start` to `end`, on `new`."""
    if end is start:
        return new
    return insert(graph, end.target, (_replay_views(graph, end.args[0], start, new, like), *end.args[1:]), like, dict(end.kwargs))


def _comes_from(node: Any, source: fx.Node) -> bool:
    while isinstance(node, fx.Node) and node is not source:
        node = node.args[0] if node.args else None
    return node is source


def _column(graph: fx.Graph, ids: Any, like: fx.Node) -> fx.Node:
    return insert(graph, aten.slice.Tensor, (ids, 1, 0, 1), like)


def _slot_weight(graph: fx.Graph, gate: Any, weights: Any, like: fx.Node) -> fx.Node:
    if gate is None:
        return insert(graph, aten.full_like.default, (_column(graph, weights, like), 1.0), like)
    if dtype(gate) == dtype(weights):
        return gate
    return insert(graph, aten._to_copy.default, (gate,), like, {"dtype": dtype(weights)})


def _cut(graph: fx.Graph, node: Any, dim: int, j: int, size: int, like: fx.Node) -> fx.Node:
    if (shape(node) or ())[dim] == size:
        return node
    return insert(graph, aten.slice.Tensor, (node, dim, j * size, (j + 1) * size), like)


def _unsqueeze(graph: fx.Graph, node: Any, like: fx.Node) -> fx.Node:
    return insert(graph, aten.unsqueeze.default, (node, 0), like)


def _slot_first(graph: fx.Graph, weight: Any, j: int, routed: Raised, shared_code: Any, code: Any, like: fx.Node) -> fx.Node:
    """Rows of slot j in the column order of the routed experts: [1, 2D, H] (or [1, 2D] for a bias)."""
    shared, wanted, size = Activation.decode(shared_code), Activation.decode(code), routed.intermediate
    if not wanted.gated:
        return _unsqueeze(graph, _cut(graph, weight, 0, j, size, like), like)
    if shared.columns == wanted.columns and (shape(weight) or ())[0] == 2 * size:
        return _unsqueeze(graph, weight, like)
    gate, up = _halves(graph, weight, shared.columns, like)
    gate, up = (_cut(graph, half, 0, j, size, like) for half in (gate, up))
    pair = [up, gate] if wanted.columns.endswith("up_first") else [gate, up]
    if wanted.columns.startswith("interleaved"):
        joined = insert(graph, aten.flatten.using_ints, (insert(graph, aten.stack.default, (pair, 1), like), 0, 1), like)
    else:
        joined = insert(graph, aten.cat.default, (pair, 0), like)
    return _unsqueeze(graph, joined, like)


def _halves(graph: fx.Graph, weight: Any, columns: str, like: fx.Node) -> tuple[fx.Node, fx.Node]:
    total = int((shape(weight) or ())[0])
    if columns.startswith("interleaved"):
        first, second = (insert(graph, aten.slice.Tensor, (weight, 0, i, total, 2), like) for i in (0, 1))
    else:
        first, second = (insert(graph, aten.slice.Tensor, (weight, 0, i * total // 2, (i + 1) * total // 2), like) for i in (0, 1))
    return (second, first) if columns.endswith("up_first") else (first, second)


def _slot_bias(graph: fx.Graph, bias: Any, slots: list[Any], weights: list[fx.Node], like: fx.Node) -> fx.Node | None:
    """The routed bias [E, n] with a row a slot; zero rows where one side has none."""
    if bias is None and all(s is None for s in slots):
        return None
    zero = [insert(graph, aten.select.int, (insert(graph, aten.mul.Tensor, (w, 0.0), like), 2, 0), like) for w in weights]
    rows = [zero[j] if s is None else s for j, s in enumerate(slots)]
    if bias is None:
        raise ValueError("the shared expert has a bias and the routed experts have none")
    return insert(graph, aten.cat.default, ([bias, *rows], 0), like)
