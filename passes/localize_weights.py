"""Keep on a rank only the weights its graph still reads.

%w = slice(p_experts, 0, 4, 8)      ->      p_experts, which is the parameter's rows 4..8 from now on
p_other_expert, unused              ->      gone
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from moefx.graph import aten, is_call, is_weight


@dataclass(frozen=True)
class Localized:
    """`rows[name]` are the [first, end) of a parameter that this rank keeps; `dropped` the parameters it reads nothing of."""

    rows: dict[str, tuple[int, int]]
    dropped: tuple[str, ...]


def run(graph: fx.Graph, before: set[str]) -> Localized:
    """Rewrite `graph` in place; `before` are the weights the layer read before it was sharded."""
    rows: dict[str, tuple[int, int]] = {}
    for node in [n for n in graph.nodes if is_weight(n)]:
        users = list(node.users)
        cuts = {(u.args[2], u.args[3]) for u in users if is_call(u, {aten.slice.Tensor}) and u.args[0] is node and u.args[1] == 0}
        if users and len(cuts) == 1 and all(is_call(u, {aten.slice.Tensor}) for u in users):
            rows[node.meta["weight"]] = next(iter(cuts))
            node.meta["val"] = users[0].meta["val"]
            for user in users:
                user.replace_all_uses_with(node)
                graph.erase_node(user)
    graph.lint()
    used = {n.meta["weight"] for n in graph.nodes if is_weight(n) and n.users}
    return Localized(rows, tuple(sorted(before - used)))
