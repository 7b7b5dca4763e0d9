"""Split the routed experts over expert-parallel ranks.

    experts(x, ids, weights, w13, w2)
      virtual ranks ->  experts(x, ids, weights, w13[:E], w2[:E]; first=0) + experts(x, ids, weights, w13[E:], w2[E:]; first=E) + ...
      a2a "none"    ->  all_reduce(experts(x, ids, weights, w13 of this rank, ...; first=rank*E))
      all-to-all    ->  combine(experts(dispatch(x, ids, weights), w13 of this rank, ...; first=rank*E))

Rank r owns the experts [r*E, (r+1)*E), the last rank the shared slots too: a slot counts once whatever the number of ranks.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from moefx import ops
from moefx.graph import aten, insert, is_call, shape
from moefx.options import Options


def expert_ranges(experts: int, ep_size: int, total: int) -> list[tuple[int, int]]:
    """[first, end) of every rank for `experts` routed experts and `total` with the slots."""
    each = experts // ep_size
    return [(r * each, total if r == ep_size - 1 else (r + 1) * each) for r in range(ep_size)]


def run(
    graph: fx.Graph, node: fx.Node, experts: int, options: Options, rank: int | None = None, group_name: str | None = None
) -> list[fx.Node]:
    """Rewrite `graph` in place; returns the `moefx.experts` nodes that run here (one a virtual rank, one in all with a group)."""
    if options.ep_size == 1:
        return [node]
    total = int((shape(node.args[3]) or ())[0])
    ranges = expert_ranges(experts, options.ep_size, total)
    with graph.inserting_before(node):
        if rank is None:
            parts = [_on_rank(graph, node, node.args[:3], begin, end) for begin, end in ranges]
            result = parts[0]
            for part in parts[1:]:
                result = insert(graph, aten.add.Tensor, (result, part), node)
        else:
            parts, result = _with_group(graph, node, ranges[rank], experts // options.ep_size, options, str(group_name))
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    graph.eliminate_dead_code()
    graph.lint()
    return parts


def _on_rank(graph: fx.Graph, node: fx.Node, tokens: Any, begin: int, end: int) -> fx.Node:
    weights = [_rows(graph, w, begin, end, node) for w in node.args[3:7]]
    return insert(graph, ops.experts, (*tokens, *weights, node.args[7], begin), node)


def _rows(graph: fx.Graph, weight: Any, begin: int, end: int, like: fx.Node) -> fx.Node | None:
    """weight[begin:end], taken as near to the parameter as can be: a rank then touches its own experts' weights only."""
    if weight is None:
        return None
    if is_call(weight, {aten.transpose.int}) and set(weight.args[1:]) == {1, 2}:
        return insert(graph, aten.transpose.int, (_rows(graph, weight.args[0], begin, end, like), 1, 2), like)
    if is_call(weight, {aten.stack.default}) and len(weight.args) == 1:
        return insert(graph, aten.stack.default, (weight.args[0][begin:end],), like)
    if is_call(weight, {aten.cat.default}) and weight.args[1] == 1:
        return insert(graph, aten.cat.default, ([_rows(graph, part, begin, end, like) for part in weight.args[0]], 1), like)
    if is_call(weight, {aten.cat.default}) and weight.args[1] == 0:
        at, found = 0, []
        for part in weight.args[0]:
            size = int((shape(part) or ())[0])
            low, high = max(begin, at), min(end, at + size)
            if low < high:
                found.append(part if high - low == size else _rows(graph, part, low - at, high - at, like))
            at += size
        return found[0] if len(found) == 1 else insert(graph, aten.cat.default, (found, 0), like)
    return insert(graph, aten.slice.Tensor, (weight, 0, begin, end), like)


def _with_group(
    graph: fx.Graph, node: fx.Node, own: tuple[int, int], each: int, options: Options, group: str
) -> tuple[list[fx.Node], fx.Node]:
    from moefx import parallel

    if options.a2a == "none":
        part = _on_rank(graph, node, node.args[:3], *own)
        return [part], insert(graph, parallel.all_reduce, (part, group), node)
    x, ids, weights = node.args[:3]
    sent = insert(graph, parallel.dispatch, (x, ids, weights, each, group), node)
    pieces = [insert(graph, operator.getitem, (sent, i), node) for i in range(6)]
    part = _on_rank(graph, node, pieces[:3], *own)
    tokens = insert(graph, aten.sym_size.int, (x, 0), node)
    return [part], insert(graph, parallel.combine, (part, *pieces[3:], tokens, group), node)
