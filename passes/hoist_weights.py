"""Take what depends on weights alone out of the call: it is computed once and kept until a weight changes.

%w = cat(p_gate_up, unsqueeze(p_shared))            pack(p_gate_up, p_shared) -> (w,)
%y = kernel(x, ids, weights, %w)               ->   %y = kernel(x, ids, weights, packed_0)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from moefx.graph import is_weight, value, weight_only


@dataclass(frozen=True)
class Hoisted:
    """`pack` maps the `sources` (qualified names, in order) to the packed tensors; None when nothing was hoisted."""

    pack: fx.GraphModule | None
    sources: tuple[str, ...]


def run(graph: fx.Graph) -> Hoisted:
    """Rewrite `graph` in place: packed tensors become placeholders marked `meta["packed"] = position`."""
    constant = weight_only(graph)
    hoist = [
        n
        for n in graph.nodes
        if n in constant and n.op == "call_function" and _is_used_outside(n, constant) and isinstance(value(n), torch.Tensor)
    ]
    if not hoist:
        return Hoisted(None, ())
    new, mapping, needed = fx.Graph(), {}, _ancestors_in_order(graph, hoist)
    sources = [n for n in needed if is_weight(n)]
    for node in sources:
        mapping[node] = new.placeholder(node.name)
    for node in needed:
        if node not in mapping:
            mapping[node] = new.node_copy(node, mapping.__getitem__)
    new.output(tuple(mapping[n] for n in hoist))
    owner = graph.owning_module
    attributes = {n.target: getattr(owner, n.target) for n in new.nodes if n.op == "get_attr"}
    first_input = next(n for n in graph.nodes if not is_weight(n))
    for i, node in enumerate(hoist):
        with graph.inserting_before(first_input):
            packed = graph.placeholder(f"packed_{i}")
        packed.meta = {"val": node.meta["val"], "packed": i}
        node.replace_all_uses_with(packed)
    graph.eliminate_dead_code()
    graph.lint()
    return Hoisted(fx.GraphModule(attributes, new), tuple(n.meta["weight"] for n in sources))


def _is_used_outside(node: fx.Node, constant: set[fx.Node]) -> bool:
    return any(user not in constant for user in node.users)


def _ancestors_in_order(graph: fx.Graph, roots: list[fx.Node]) -> list[fx.Node]:
    seen: set[fx.Node] = set()
    todo = list(roots)
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo.extend(node.all_input_nodes)
    return [n for n in graph.nodes if n in seen]
