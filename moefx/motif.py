"""The MLP motif: one GEMM (or two) -> pointwise region -> one GEMM, each with a weight. Experts and shared experts are both made of it.

up   = linear(x, w13)            gate, up = linear(x, w1), linear(x, w3)
h    = act(up)             or    h        = act(gate, up)
down = linear(h, w2)             down     = linear(h, w2)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from moefx.graph import VIEWS, aten, is_call, shape, value

GROUPED_NAMES = ("_grouped_mm", "grouped_mm_fallback", "grouped_mm")
_GATHERS = frozenset({aten.index.Tensor, aten.index_select.default, aten.embedding.default})
_WEIGHT_VIEWS = VIEWS | {aten.select.int, aten.slice.Tensor, aten._to_copy.default}


@dataclass(frozen=True)
class Gemm:
    """One matrix product with a weight.

    kind: "grouped" (weight [E, in, out]), "gathered" (weight rows chosen by an index), "batched" (bmm with all E), "plain" (2-D weight).
    weight: the weight-only node as it stands before any gather; `linear` is true when it is stored [.., out, in]; None: not known here.
    data: the activation operand; output: the node that holds the product, with the bias added and views passed, features last.
    """

    node: fx.Node
    kind: str
    data: fx.Node
    weight: fx.Node
    linear: bool | None
    bias: fx.Node | None
    output: fx.Node
    index: fx.Node | None = None


@dataclass(frozen=True)
class Motif:
    """An MLP: `first` GEMMs (gate_up, or gate and up apart), `region` the pointwise output fed to `second`."""

    first: tuple[Gemm, ...]
    region: fx.Node
    second: Gemm

    @property
    def gemms(self) -> tuple[Gemm, ...]:
        return (*self.first, self.second)


def find_gemms(graph: fx.Graph, weights: set[fx.Node]) -> dict[fx.Node, Gemm]:
    """Every GEMM of the graph that has exactly one weight operand, by the node of its product."""
    found = {}
    for node in graph.nodes:
        gemm = _gemm(node, weights)
        if gemm is not None:
            found[node] = gemm
    return found


def _gemm(node: fx.Node, weights: set[fx.Node]) -> Gemm | None:
    if node.op != "call_function" or node in weights or not isinstance(value(node), torch.Tensor):
        return None
    name = getattr(node.target, "__name__", "").split(".")[0]
    if name in GROUPED_NAMES:
        return _with_output(node, "grouped", node.args[0], node.args[1], False, None, weights)
    if is_call(node, {aten.linear.default}):
        bias = node.args[2] if len(node.args) > 2 else None
        return _with_output(node, "plain", node.args[0], node.args[1], True, bias, weights)
    if is_call(node, {aten.addmm.default}):
        return _with_output(node, "plain", node.args[1], node.args[2], False, node.args[0], weights)
    if is_call(node, {aten.mm.default}):
        a, b = node.args
        if a in weights:
            return _with_output(node, "plain", b, a, True, None, weights)
        return _with_output(node, "plain", a, b, False, None, weights)
    if is_call(node, {aten.bmm.default, aten.baddbmm.default}):
        a, b = node.args[-2:]
        for data, other in ((a, b), (b, a)):
            weight, index = _ungather(other, weights)
            if weight is not None:
                return _with_output(node, "gathered" if index is not None else "batched", data, weight, None, None, weights, index=index)
    return None


def _ungather(node: Any, weights: set[fx.Node]) -> tuple[fx.Node | None, fx.Node | None]:
    """(weight, index) behind a weight operand of bmm: weight[index], under views; index None when all experts are taken."""
    while isinstance(node, fx.Node):
        if node in weights:
            return node, None
        if is_call(node, _GATHERS):
            source, index = node.args[0], node.args[-1]
            if is_call(node, {aten.index.Tensor}):
                if len(index) != 1:
                    return None, None
                index = index[0]
            return (source, index) if source in weights and isinstance(index, fx.Node) else (None, None)
        if not is_call(node, _WEIGHT_VIEWS):
            return None, None
        node = node.args[0]
    return None, None


def _with_output(node, kind, data, weight, linear, bias, weights, index=None) -> Gemm | None:
    if weight not in weights or data in weights or not isinstance(data, fx.Node):
        return None
    output = node
    found_bias = bias
    while True:
        added = _bias_added(output, weights) if found_bias is None else None
        if added is not None:
            output, found_bias = added
            continue
        users = list(output.users)
        if len(users) == 1 and is_call(users[0], VIEWS - {aten.expand.default}):
            output = users[0]
            continue
        break
    return Gemm(node, kind, data, weight, linear, found_bias, output, index)


def _bias_added(node: fx.Node, weights: set[fx.Node]) -> tuple[fx.Node, fx.Node] | None:
    """(sum, bias weight) when the only use of `node` adds a bias to it: a weight, or weight rows chosen by an index."""
    users = list(node.users)
    if len(users) != 1 or not is_call(users[0], {aten.add.Tensor}) or users[0].kwargs:
        return None
    a, b = users[0].args
    other = b if a is node else a
    bias, _ = _ungather(other, weights)
    return (users[0], bias) if bias is not None and len(shape(bias) or ()) in (1, 2, 3) else None


def find_motifs(gemms: dict[fx.Node, Gemm], weights: set[fx.Node]) -> list[Motif]:
    """Every MLP: a GEMM whose data comes from one or two other GEMMs through element-wise ops alone."""
    by_output = {g.output: g for g in gemms.values()}
    motifs = []
    for second in gemms.values():
        region = region_output(second)
        leaves = region_leaves(region, by_output, weights)
        if leaves and len(leaves) <= 2 and second not in leaves:
            motifs.append(Motif(tuple(leaves), region, second))
    return motifs


def region_output(second: Gemm) -> fx.Node:
    """The node that is the activation's result: the data of the second GEMM, up through views that only reshape it."""
    node = second.data
    while is_call(node, VIEWS - {aten.expand.default}) and len(node.args[0].users) == 1:
        node = node.args[0]
    return node


_DISPATCH = _GATHERS | {aten.index_put.default, aten.index_add.default, aten.scatter.src, aten.gather.default, aten.index_copy.default}


def region_leaves(output: fx.Node, by_output: dict[fx.Node, Gemm], weights: set[fx.Node]) -> list[Gemm] | None:
    """The GEMMs a pointwise region starts from, in graph order; None when it also depends on something else."""
    leaves: set[Gemm] = set()
    seen: set[fx.Node] = set()
    todo = [output]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in by_output:
            leaves.add(by_output[node])
            continue
        if node in weights or not isinstance(value(node), (torch.Tensor, tuple, list)):
            continue
        if node.op == "placeholder" or is_call(node, _DISPATCH) or len(seen) > 400:
            return None
        if not node.all_input_nodes:
            continue
        todo.extend(node.all_input_nodes)
    return sorted(leaves, key=lambda g: _position(g.node))


def _position(node: fx.Node) -> int:
    return next(i for i, n in enumerate(node.graph.nodes) if n is node)
