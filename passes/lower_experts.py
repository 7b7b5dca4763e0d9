"""Lower canonical experts to the kernel the plan chose.

experts(x, ids, weights, w13, b13, w2, b2; swiglu, first)
    ->  %p = kernel.pack(w13, b13, w2, b2; swiglu), kernel.op(x, ids, weights, *%p; swiglu, first)
"""

from __future__ import annotations

import operator

from torch import fx

from moefx.graph import insert
from moefx.kernels.base import Kernel


def run(graph: fx.Graph, nodes: list[fx.Node], kernel: Kernel, reference: bool = False) -> None:
    """Rewrite `graph` in place; `reference` takes the kernel's plain-PyTorch reference for its op (to check the kernel against)."""
    for node in nodes:
        x, ids, weights, w13, b13, w2, b2, activation = node.args[:8]
        first = node.args[8] if len(node.args) > 8 else 0
        with graph.inserting_before(node):
            pack = insert(graph, kernel.pack, (w13, b13, w2, b2, activation), node)
            values = pack.meta["val"]
            parts = [insert(graph, operator.getitem, (pack, i), node) if v is not None else None for i, v in enumerate(values)]
            new = graph.call_function(kernel.reference if reference else kernel.op, (x, ids, weights, *parts, activation, first))
            new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    graph.eliminate_dead_code()
    graph.lint()
