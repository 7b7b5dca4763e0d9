"""From MLP motifs to mixture-of-experts instances: which motifs together are the experts of one layer, and their stacked weights."""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from moefx.activation.recognise import fingerprint
from moefx.graph import aten, insert, is_call, is_weight, line_of, shape
from moefx.motif import Gemm, Motif

_FORMS = {"grouped": "grouped_mm", "gathered": "gathered_bmm", "batched": "dense"}


@dataclass(frozen=True)
class Instance:
    """The experts of one layer: one motif (stacked weights) or one motif an expert, in expert order."""

    motifs: tuple[Motif, ...]
    form: str
    experts: int
    turned: tuple[bool, bool] = (False, False)  # square weights [E, n, n] of the first and second product: taken as [.., in, out]

    @property
    def first(self) -> tuple[Gemm, ...]:
        return self.motifs[0].first

    @property
    def ends(self) -> list[fx.Node]:
        return [m.second.node for m in self.motifs]


def find_instances(motifs: Sequence[Motif]) -> list[Instance]:
    """Stacked motifs stand alone; motifs with 2-D weights form one instance per family (same region, same sizes, same weight names)."""
    found = [Instance((m,), _FORMS[m.second.kind], _leading(m.second.weight)) for m in motifs if m.second.kind in _FORMS and _stacked(m)]
    families: dict[object, list[Motif]] = defaultdict(list)
    for motif in motifs:
        if motif.second.kind == "plain" and all(g.kind == "plain" for g in motif.first):
            families[_family(motif)].append(motif)
    for family in families.values():
        if len(family) > 1:
            form = "loop" if _select(family[0].second.weight) is not None else "module_list"
            found.append(Instance(tuple(family), form, len(family)))
    return found


def turns(instance: Instance) -> list[Instance]:
    """The instance with every reading of its square weights, whose orientation sizes do not tell; a trial on numbers does."""
    if instance.form not in ("gathered_bmm", "dense"):
        return [instance]
    gemms = (instance.first[0], instance.motifs[0].second)
    square = [(shape(stacked_root(g.weight)[0]) or (0, 1, 2))[1:] for g in gemms]
    choices = [(False, True) if len(s) == 2 and s[0] == s[1] else (False,) for s in square]
    return [replace(instance, turned=(a, b)) for a in choices[0] for b in choices[1]]


def _stacked(motif: Motif) -> bool:
    return all(g.kind == motif.second.kind for g in motif.first) and _leading(motif.second.weight) == _leading(motif.first[0].weight) > 1


def _leading(weight: fx.Node) -> int:
    return stacked_root(weight)[1]


def stacked_root(weight: fx.Node) -> tuple[fx.Node, int]:
    """The node, from `weight` up, that is the 3-D stack of experts [E, a, b], and E; (weight, 0) when there is none."""
    node: fx.Node | None = weight
    best: tuple[fx.Node, int] = (weight, 0)
    while node is not None:
        sizes = shape(node) or ()
        if len(sizes) == 3 and sizes[0] > 1:
            return node, int(sizes[0])
        node = node.args[0] if node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node) else None
    return best


def _family(motif: Motif) -> object:
    names = tuple(_family_of(g.weight) for g in motif.gemms)
    sizes = tuple(shape(g.weight) for g in motif.gemms)
    return names, sizes, tuple(g.bias is not None for g in motif.gemms), fingerprint(motif.region, [g.output for g in motif.first])


def _family_of(weight: fx.Node) -> object:
    """What the weights of sibling experts share: the stacked parameter, or the parameter name without its numbers."""
    chosen = _select(weight)
    if chosen is not None:
        return chosen[0]
    node = weight
    while not is_weight(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return re.sub(r"\d+", "#", str(node.meta.get("weight", node.name)))


def _select(weight: fx.Node) -> tuple[fx.Node, int, list[fx.Node]] | None:
    """(stack, expert, later views) when `weight` is one expert's slice of a stacked weight under simple views."""
    later: list[fx.Node] = []
    node = weight
    while node.op == "call_function":
        if is_call(node, {aten.select.int}) and node.args[1] == 0 and isinstance(node.args[2], int):
            return node.args[0], node.args[2], later[::-1]
        if node.target is operator.getitem and is_call(node.args[0], {aten.unbind.int}):
            source = node.args[0]
            if len(source.args) < 2 or source.args[1] == 0:
                return source.args[0], node.args[1], later[::-1]
        if not is_call(node, {aten.t.default, aten.transpose.int, aten.slice.Tensor, aten.permute.default}):
            return None
        later.append(node)
        node = node.args[0]
    return None


def first_weight(graph: fx.Graph, instance: Instance, hidden: int, gate_first: Sequence[Gemm]) -> tuple[fx.Node, fx.Node | None]:
    """w13 [E, 2D or D, H] and b13; two GEMMs are laid out as gate, then up (`gate_first` in that order)."""
    parts = [_expert_weight(graph, instance, instance.first.index(g), hidden, transposed_in=1) for g in gate_first]
    biases = [_expert_bias(graph, instance, instance.first.index(g)) for g in gate_first]
    like = instance.ends[0]
    if len(parts) == 1:
        return parts[0], biases[0]
    w13 = insert(graph, aten.cat.default, (parts, 1), like)
    known = [b for b in biases if b is not None]
    if not known:
        return w13, None
    if len(known) != len(biases):
        raise ValueError("one of the gate and up GEMMs has a bias and the other none")
    return w13, insert(graph, aten.cat.default, (known, 1), like)


def second_weight(graph: fx.Graph, instance: Instance, hidden: int) -> tuple[fx.Node, fx.Node | None]:
    """w2 [E, H, D] and b2."""
    return _expert_weight(graph, instance, -1, hidden, transposed_in=2), _expert_bias(graph, instance, -1)


def _expert_weight(graph: fx.Graph, instance: Instance, position: int, hidden: int, transposed_in: int) -> fx.Node:
    """[E, out, in]; `transposed_in` is the dim of H in the result (2 - 1 for w13's last, 1 for w2's middle)."""
    gemms = [m.gemms[position] for m in instance.motifs]
    like = gemms[0].node
    if gemms[0].kind == "plain":
        stack = _stack(graph, [g.weight for g in gemms], like)
        return stack if gemms[0].linear else insert(graph, aten.transpose.int, (stack, 1, 2), like)
    if gemms[0].kind == "grouped":
        operand = gemms[0].weight
        if is_call(operand, {aten.transpose.int}):
            return operand.args[0]
        return insert(graph, aten.transpose.int, (operand, 1, 2), like)
    root, _ = stacked_root(gemms[0].weight)
    want = 2 if transposed_in == 1 else 1
    sizes = shape(root) or ()
    turn = instance.turned[0 if transposed_in == 1 else 1] and sizes[1] == sizes[2]
    if sizes[want] == hidden and not turn:
        return root
    if sizes[3 - want] == hidden:
        return insert(graph, aten.transpose.int, (root, 1, 2), like)
    raise ValueError(f"the expert weight {root.name} of shape {tuple(sizes)} has no dim of the hidden size {hidden} ({line_of(like)})")


def _expert_bias(graph: fx.Graph, instance: Instance, position: int) -> fx.Node | None:
    gemms = [m.gemms[position] for m in instance.motifs]
    biases = [g.bias for g in gemms if g.bias is not None]
    if not biases:
        return None
    like = gemms[0].node
    if gemms[0].kind == "plain":
        return _stack(graph, biases, like)
    bias = biases[0]
    sizes = shape(bias) or ()
    if len(sizes) == 3:
        keep = [int(s) for s in sizes if s != 1]
        bias = insert(graph, aten.view.default, (bias, keep), like)
    return bias


def _stack(graph: fx.Graph, parts: list[fx.Node], like: fx.Node) -> fx.Node:
    """[E, ...] of the experts' weights: the stacked parameter itself where they are its slices in order, else a stack."""
    chosen = [_select(p) for p in parts]
    known = [c for c in chosen if c is not None]
    if len(known) == len(parts) and len({c[0] for c in known}) == 1:
        root = known[0][0]
        if (shape(root) or (0,))[0] == len(parts) and [c[1] for c in known] == list(range(len(parts))):
            return _replay(graph, root, known[0][2], like)
    return insert(graph, aten.stack.default, (parts,), like)


def _replay(graph: fx.Graph, root: fx.Node, later: list[fx.Node], like: fx.Node) -> fx.Node:
    """The views that followed the selection of one expert, on the whole stack: every dim one further."""
    node = root
    for view in later:
        rank = len(shape(view) or ())
        if is_call(view, {aten.t.default}):
            node = insert(graph, aten.transpose.int, (node, 1, rank), like)
        elif is_call(view, {aten.transpose.int}):
            a, b = (int(d) % rank + 1 for d in view.args[1:3])
            node = insert(graph, aten.transpose.int, (node, a, b), like)
        elif is_call(view, {aten.permute.default}):
            node = insert(graph, aten.permute.default, (node, [0, *(int(d) % rank + 1 for d in view.args[1])]), like)
        else:
            dim = int(view.args[1]) % rank + 1 if len(view.args) > 1 else 1
            node = insert(graph, aten.slice.Tensor, (node, dim, *view.args[2:]), like)
    return node


def is_float(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and val.is_floating_point()
