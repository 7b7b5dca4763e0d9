"""Raise the MLP that every token passes beside the routed experts to `moefx.shared_expert`.

    %g = linear(x, w_gate), %u = linear(x, w_up), %y = linear(silu(%g) * %u, w_down), %s = sigmoid(linear(x, w)) * %y
    add(routed, %s)      ->      add(routed, moefx.shared_expert(x, sigmoid(linear(x, w)), cat(w_gate, w_up), None, w_down, None; swiglu))

A shared expert whose activation is no named variant stays as it is and is reported.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from moefx import ops
from moefx.activation.recognise import Refused, recognise
from moefx.activation.spec import Activation
from moefx.graph import VIEWS, ancestors, aten, dtype, features, insert, is_call, shape, through_views, weight_only
from moefx.motif import Motif, find_gemms, find_motifs
from moefx.passes.raise_experts import Raised


@dataclass(frozen=True)
class RaisedShared:
    """`node` is the `moefx.shared_expert` call (None when left as it was), `join` the add with the routed output.

    `why_unfused`: what the graph shows against a fused slot (scaling of the routed part, another value in between), or None.
    """

    node: fx.Node | None
    join: fx.Node
    intermediate: int
    gate: str | None
    activation: Activation
    bias: bool
    why_unfused: str | None


def run(graph: fx.Graph, routed: Raised) -> RaisedShared | None:
    """Rewrite `graph` in place; None when the layer has no shared expert."""
    weights = weight_only(graph)
    found = []
    for motif in find_motifs(find_gemms(graph, weights), weights):
        if motif.second.kind == "plain" and all(
            g.kind == "plain" and through_views(g.data) is through_views(routed.x) for g in motif.first
        ):
            shared = _follow(motif, routed)
            if shared is not None:
                found.append((motif, shared))
    if not found:
        return None
    motif, (end, join, gate, why) = found[0]
    if len(found) > 1:
        why = why or f"the layer has {len(found)} separate shared experts"
    return _rewrite(graph, motif, end, join, gate, why, routed)


def _follow(motif: Motif, routed: Raised) -> tuple[fx.Node, fx.Node, fx.Node | None, str | None] | None:
    """(last node of the shared branch, the add, the gate, why unfused), or None when the MLP does not meet the routed output."""
    node, gate, why = motif.second.output, None, None
    while True:
        users = list(node.users)
        if len(users) != 1:
            return None
        user = users[0]
        if is_call(user, VIEWS):
            node = user
        elif is_call(user, {aten.mul.Tensor}):
            other = user.args[1] if user.args[0] is node else user.args[0]
            if gate is None and why is None and _is_sigmoid_gate(other, routed):
                gate = other
            else:
                why = "its output is scaled by something other than a sigmoid gate"
            node = user
        elif is_call(user, {aten.add.Tensor}):
            other = user.args[1] if user.args[0] is node else user.args[0]
            if not isinstance(other, fx.Node) or routed.node not in ancestors([other]):
                return None
            if user.kwargs.get("alpha", 1) != 1:
                why = why or "the sum of routed and shared part is scaled"
            if through_views(other) is not routed.node:
                top = through_views(other)
                name = getattr(top.target, "__name__", str(top.target)).split(".")[0]
                why = why or f"the routed output passes {name} before the shared part is added"
            return node, user, gate, why
        else:
            return None


def _is_sigmoid_gate(node: object, routed: Raised) -> bool:
    top = through_views(node)
    if not is_call(top, {aten.sigmoid.default}) or not isinstance(node, fx.Node):
        return False
    logits = through_views(top.args[0])
    return (
        is_call(logits, {aten.linear.default})
        and through_views(logits.args[0]) is through_views(routed.x)
        and (shape(logits) or (0,))[-1] == 1
    )


def _rewrite(
    graph: fx.Graph, motif: Motif, end: fx.Node, join: fx.Node, gate: fx.Node | None, why: str | None, routed: Raised
) -> RaisedShared:
    hidden, intermediate = features(motif.second.output), features(motif.region)
    bias = any(g.bias is not None for g in motif.gemms)
    kind = "sigmoid" if gate is not None else None
    found = recognise(motif.region, [g.output for g in motif.first])
    if isinstance(found, Refused) or (why or "").startswith("its output"):
        reason = found.reason if isinstance(found, Refused) else why
        activation = Activation("opaque") if isinstance(found, Refused) else found.activation
        return RaisedShared(None, join, intermediate, kind, activation, bias, reason)
    like = end
    by_output = {g.output: g for g in motif.first}
    first = [by_output[leaf] for leaf in found.leaves]
    with graph.inserting_before(join):
        x = _rows(graph, routed.x, hidden, like)
        rows_gate = _rows(graph, gate, 1, like) if gate is not None else None
        parts = [g.weight if g.linear else insert(graph, aten.t.default, (g.weight,), like) for g in first]
        w13 = parts[0] if len(parts) == 1 else insert(graph, aten.cat.default, (parts, 0), like)
        biases = [g.bias for g in first if g.bias is not None]
        if biases and len(biases) != len(first):
            return RaisedShared(None, join, intermediate, kind, found.activation, bias, "one of gate and up has a bias and the other none")
        b13 = None if not biases else biases[0] if len(biases) == 1 else insert(graph, aten.cat.default, (biases, 0), like)
        w2 = motif.second.weight if motif.second.linear else insert(graph, aten.t.default, (motif.second.weight,), like)
        node = insert(graph, ops.shared_expert, (x, rows_gate, w13, b13, w2, motif.second.bias, found.activation.encode()), like)
        new = _in_shape_of(graph, node, end, join)
    join.replace_input_with(end, new)
    graph.eliminate_dead_code()
    graph.lint()
    return RaisedShared(node, join, intermediate, kind, found.activation, bias, why)


def _rows(graph: fx.Graph, node: fx.Node, width: int, like: fx.Node) -> fx.Node:
    return node if len(shape(node) or ()) == 2 else insert(graph, aten.reshape.default, (node, [-1, width]), like)


def _in_shape_of(graph: fx.Graph, node: fx.Node, end: fx.Node, join: fx.Node) -> fx.Node:
    """`node` [T, H] in the rank and dtype of the branch it replaces."""
    if dtype(node) != dtype(end):
        node = insert(graph, aten._to_copy.default, (node,), end, {"dtype": dtype(end)})
    if len(shape(end) or ()) == 2:
        return node
    other = join.args[1] if join.args[0] is end else join.args[0]
    return insert(graph, aten.view_as.default, (node, other), end)
