"""Raise routed experts, however they are written, to `moefx.experts`.

    %s = sort(ids), %g = grouped_mm(x[%s], w13, offs), %a = silu(gate) * up, %d = grouped_mm(%a, w2, offs), ... sum over K
    %m = where(one_hot(ids)[e]), linear(x[%m], w13[e]), ..., index_add(out, token, y * weights[...])      for every e
    bmm(w13[ids], x), ..., bmm(w2[ids], act), ... sum over K          ->   moefx.experts(x, ids, weights, w13, b13, w2, b2; activation)

What is matched is small: the expert MLPs (GEMM, pointwise region, GEMM). How tokens get there and back is not parsed. Instead the nodes
`x`, `ids`, `weights` and the output are chosen so that they cut the graph, and the region between them must give the same numbers as the
canonical op on inputs that reach every expert and every clamp (`Trial`); what differs is left alone with a reason.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from moefx import ops
from moefx.activation.recognise import Refused, recognise
from moefx.activation.spec import Activation
from moefx.graph import (
    VIEWS,
    ancestors,
    aten,
    descendants,
    dtype,
    features,
    insert,
    is_call,
    line_of,
    numel,
    region,
    same_size,
    shape,
    weight_only,
)
from moefx.instance import Instance, find_instances, first_weight, is_float, second_weight, turns
from moefx.motif import Gemm, Motif, find_gemms, find_motifs
from moefx.unseen import unseen

_GATHERS = frozenset(
    {
        aten.index.Tensor,
        aten.index_select.default,
        aten.repeat_interleave.self_int,
        aten.repeat.default,
        aten.gather.default,
        aten.cat.default,
        aten.slice.Tensor,
        aten.narrow.default,
    }
)
_SPLITS = frozenset({aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default, aten.chunk.default, aten.tensor_split.indices})


@dataclass(frozen=True)
class Cut:
    """Where the experts begin and end: x [.., H], ids and weights [T, K] (or [T]), the output [.., H]."""

    x: fx.Node
    ids: fx.Node
    weights: fx.Node
    output: fx.Node


@dataclass(frozen=True)
class Raised:
    """One layer in canonical form. `node` is the `moefx.experts` call, or the last node of the opaque form."""

    node: fx.Node
    form: str
    activation: Activation
    rounding: str
    experts: int
    top_k: int
    intermediate: int
    hidden: int
    bias: bool
    x: fx.Node
    opaque_reason: str | None


Trial = Callable[[fx.Graph, Cut, fx.Node, Raised], str | None]
"""Compares the region of a cut with its replacement; None when they agree, else what differs. `moefx.verify` has the real one."""


def run(graph: fx.Graph, trial: Trial) -> tuple[list[Raised], list[str]]:
    """Rewrite `graph` in place. Returns the layers raised and the reasons for those that look like experts and were left alone."""
    raised: list[Raised] = []
    reasons: list[str] = []
    weights = weight_only(graph)
    gemms = find_gemms(graph, weights)
    for instance in find_instances(find_motifs(gemms, weights)):
        result = _raise(graph, instance, trial)
        if isinstance(result, Raised):
            raised.append(result)
        else:
            reasons.append(result)
    if not raised and not reasons:
        reasons.append(_nearest_miss(gemms))
    graph.eliminate_dead_code()
    graph.lint()
    return raised, reasons


def _nearest_miss(gemms: dict[fx.Node, Gemm]) -> str:
    stacked = [g for g in gemms.values() if g.kind != "plain"]
    if not gemms:
        return "no GEMM with a weight was found in the traced block"
    if stacked:
        last = stacked[-1]
        where = f"{last.node.name}, {line_of(last.node)}"
        return f"a GEMM over stacked expert weights was found ({where}), but no second one fed by it through element-wise ops alone"
    return f"{len(gemms)} GEMMs were found, but no family of two or more alike MLPs (GEMM, element-wise ops, GEMM) that could be experts"


def _raise(graph: fx.Graph, instance: Instance, trial: Trial) -> Raised | str:
    motif = instance.motifs[0]
    hidden = features(motif.second.output)
    activation, rounding, order, why_opaque = _activation(motif)
    where = f"the experts at {motif.second.node.name} ({line_of(motif.second.node)})"
    differs = None
    for turned, cut in itertools.product(turns(instance), _cuts(graph, instance, hidden)):
        with graph.inserting_before(cut.output.next):
            try:
                candidate = _replacement(graph, turned, cut, activation, rounding, order, hidden, why_opaque)
            except (ValueError, IndexError, RuntimeError) as error:
                differs = differs or str(error).splitlines()[0]
                continue
        new = _like(graph, candidate.node, cut.output)
        found = _unseen(cut, instance) or trial(graph, cut, new, candidate)
        differs = found or differs
        if found is None:
            _replace(cut.output, new)
            return candidate
        graph.eliminate_dead_code()
    if differs is not None:
        return f"{where} do not compute the canonical form: {differs}"
    return f"{where}: no (x, ids, weights) with ids and weights of shape [T, K] separates them from the router"


def _unseen(cut: Cut, instance: Instance) -> str | None:
    inner: set[fx.Node] = set()
    for motif in instance.motifs:
        inner |= ancestors([motif.region], stop={g.output for g in motif.first})
    return unseen(cut.x, cut.ids, cut.weights, cut.output, inner, {m.second.output for m in instance.motifs})


def _replace(old: fx.Node, new: fx.Node) -> None:
    old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)


def _activation(motif: Motif) -> tuple[Activation, str, tuple[Gemm, ...], str | None]:
    """(activation, rounding, first GEMMs with the gate in front, why it is opaque)."""
    found = recognise(motif.region, [g.output for g in motif.first])
    if isinstance(found, Refused):
        return Activation("opaque", "separate" if len(motif.first) == 2 else "concat"), "kept", motif.first, found.reason
    by_output = {g.output: g for g in motif.first}
    return found.activation, found.rounding, tuple(by_output[leaf] for leaf in found.leaves), None


def _cuts(graph: fx.Graph, instance: Instance, hidden: int, limit: int = 12) -> Iterator[Cut]:
    """Every cut that separates the experts from the rest, the most likely one first."""
    tokens = _tokens(instance, hidden)
    count = 0
    for x in tokens:
        total = numel((shape(x) or ())[:-1])
        outputs = _outputs(graph, instance, total, hidden)
        for output in outputs[:4]:
            before = ancestors([output], stop={x})
            rows = [n for n in graph.nodes if n in before and n is not x and _per_token(n, total)]
            floats = [n for n in rows if is_float(n)][::-1]
            integers = [n for n in rows if not is_float(n) and dtype(n) in (torch.int64, torch.int32)][::-1]
            for ids in integers:
                for weights in floats:
                    if (
                        len(shape(ids) or ()) == len(shape(weights) or ())
                        and _top_k(ids) == _top_k(weights)
                        and _closed(output, (x, ids, weights), instance, total)
                    ):
                        yield Cut(x, ids, weights, output)
                        count += 1
                        if count >= limit:
                            return


def _tokens(instance: Instance, hidden: int) -> list[fx.Node]:
    """Candidates for x, best first: along the data of the first GEMM, of its dtype and of hidden size, the earliest 2-D one in front."""
    gemm = instance.first[0]
    chain: list[fx.Node] = []
    node = gemm.data
    while isinstance(node, fx.Node):
        chain.append(node)
        if is_call(node, VIEWS | _GATHERS | {aten._to_copy.default}) and not is_call(node, {aten.cat.default}):
            node = node.args[0]
        elif is_call(node, {aten.cat.default}) and len(set(node.args[0])) == 1:
            node = node.args[0][0]
        elif node.target is operator.getitem and is_call(node.args[0], _SPLITS):
            node = node.args[0].args[0]
        else:
            break
    fit = [n for n in chain[::-1] if (shape(n) or (0,))[-1] == hidden and dtype(n) == dtype(gemm.weight)]
    root = fit[0] if fit else None
    if root is None:
        return []
    total = numel((shape(root) or ())[:-1])
    fit = [n for n in fit if same_size(numel((shape(n) or ())[:-1]), total)]
    flat = [n for n in fit if len(shape(n) or ()) == 2]
    return list(dict.fromkeys(flat[:1] + fit[:1]))


def _outputs(graph: fx.Graph, instance: Instance, total: object, hidden: int) -> list[fx.Node]:
    """Nodes after every expert, of shape [.., H] with all T tokens, earliest first; a cast back to x's dtype counts with its source."""
    reach: set[fx.Node] | None = None
    for end in instance.ends:
        below = descendants(end)
        reach = below if reach is None else reach & below
    found = []
    ends = set(instance.ends) | {m.second.output for m in instance.motifs}
    for node in graph.nodes:
        if node in (reach or ()) and node not in ends and node.op == "call_function":
            sizes = shape(node)
            if sizes and len(sizes) in (2, 3) and sizes[-1] == hidden and same_size(numel(sizes[:-1]), total):
                found.append(_with_cast(node, instance))
    return list(dict.fromkeys(found))


def _with_cast(node: fx.Node, instance: Instance) -> fx.Node:
    users = list(node.users)
    narrow = dtype(instance.first[0].data)
    if dtype(node) != narrow and len(users) == 1 and is_call(users[0], {aten._to_copy.default}) and dtype(users[0]) == narrow:
        return users[0]
    return node


def _per_token(node: fx.Node, total: object) -> bool:
    """A tensor [T], [T, K] or [B, S, K] with a small static K."""
    sizes = shape(node)
    if not sizes:
        return False
    if len(sizes) == 2 and isinstance(sizes[0], int) and not isinstance(sizes[-1], int):
        return False  # [1, T] or [K, T]: a row of a one-hot table
    if len(sizes) == 1 or not isinstance(sizes[-1], int):
        return len(sizes) <= 2 and same_size(numel(sizes), total)
    return sizes[-1] <= 64 and same_size(numel(sizes[:-1]), total)


def _top_k(node: fx.Node) -> int:
    sizes = shape(node) or ()
    return int(sizes[-1]) if len(sizes) > 1 and isinstance(sizes[-1], int) else 1


def _closed(output: fx.Node, cut: Sequence[fx.Node], instance: Instance, total: object) -> bool:
    """Whether the region from `cut` to `output` needs no other tensor (sizes aside) and uses each of them."""
    inside = region([output], cut, total)
    if not set(cut) <= inside or not set(instance.ends) <= inside:
        return False
    return all(n in cut or n.op != "placeholder" or "weight" in n.meta or isinstance(n.meta.get("val"), torch.SymInt) for n in inside)


def _replacement(
    graph, instance: Instance, cut: Cut, activation: Activation, rounding: str, order: Sequence[Gemm], hidden: int, why: str | None
) -> Raised:
    like, motif = cut.output, instance.motifs[0]
    top_k = _top_k(cut.ids)
    x = _as_rows(graph, cut.x, hidden, like)
    ids, weights = _as_rows(graph, cut.ids, top_k, like), _as_rows(graph, cut.weights, top_k, like)
    w13, b13 = first_weight(graph, instance, hidden, order)
    w2, b2 = second_weight(graph, instance, hidden)
    intermediate = int((shape(w2) or ())[-1])
    if activation.kind == "opaque":
        node = _opaque(graph, motif, x, ids, weights, (w13, b13, w2, b2), top_k, hidden, like, why)
    else:
        wanted = (2 if activation.gated else 1) * intermediate
        if (shape(w13) or (0, 0))[1] != wanted or (shape(w13) or ())[-1] != hidden:
            sizes = f"{tuple(shape(w13) or ())} and {tuple(shape(w2) or ())}"
            raise ValueError(f"expert weights of shapes {sizes} do not fit a {activation.kind} MLP over hidden size {hidden}")
        node = insert(graph, ops.experts, (x, ids, weights, w13, b13, w2, b2, activation.encode()), like)
    return Raised(
        node, instance.form, activation, rounding, instance.experts, top_k, intermediate, hidden, b13 is not None or b2 is not None, x, why
    )


def _as_rows(graph: fx.Graph, node: fx.Node, width: int, like: fx.Node) -> fx.Node:
    if len(shape(node) or ()) == 2:
        return node
    return insert(graph, aten.reshape.default, (node, [-1, width]), like)


def _like(graph: fx.Graph, node: fx.Node, output: fx.Node) -> fx.Node:
    """`node` [T, H] in the dtype and shape of `output`."""
    with graph.inserting_before(node.next):
        if dtype(node) != dtype(output):
            node = insert(graph, aten._to_copy.default, (node,), output, {"dtype": dtype(output)})
        sizes = shape(output) or ()
        if len(sizes) != len(shape(node) or ()):
            lead = [insert(graph, aten.sym_size.int, (output, d), output) for d in range(len(sizes) - 1)]
            node = insert(graph, aten.reshape.default, (node, _sizes_from_inputs(graph, output, lead)), output)
    return node


def _sizes_from_inputs(graph: fx.Graph, output: fx.Node, lead: list[fx.Node]) -> list[object]:
    """Sizes for a reshape to `output`'s shape, read from an input of the graph that has the same leading sizes."""
    sizes = shape(output) or ()
    for node in graph.nodes:
        if node.op == "placeholder" and "weight" not in node.meta and len(shape(node) or ()) >= len(sizes) - 1:
            have = shape(node) or ()
            if all(same_size(a, b) for a, b in zip(have, sizes[:-1], strict=False)):
                for d, old in enumerate(lead):
                    old.args = (node, d)
                return [*lead, sizes[-1]]
    return [*lead, sizes[-1]]


def _opaque(graph, motif: Motif, x, ids, weights, stacked, top_k: int, hidden: int, like: fx.Node, why: str | None) -> fx.Node:
    """The GEMMs become `moefx.expert_linear`; the region between them is copied as it is."""
    w13, b13, w2, b2 = stacked
    region = _region_nodes(motif)
    flat = insert(graph, aten.reshape.default, (ids, [-1]), like)
    rows = insert(graph, aten.repeat_interleave.self_int, (x, top_k, 0), like)
    up = insert(graph, ops.expert_linear, (rows, flat, w13, b13), like)
    mapping: dict[fx.Node, fx.Node] = {}
    if len(motif.first) == 1:
        mapping[motif.first[0].output] = up
    else:
        half = int((shape(w13) or ())[1]) // 2
        for i, gemm in enumerate(motif.first):
            mapping[gemm.output] = insert(graph, aten.slice.Tensor, (up, 1, i * half, (i + 1) * half), like)
    for node in region:
        if node in mapping:
            continue
        if node.op != "call_function" or any(i not in mapping for i in node.all_input_nodes):
            where = f"{node.name} ({line_of(node)})"
            raise ValueError(f"the activation is not recognised ({why}) and {where} in it reads more than the expert's product")
        mapping[node] = insert(graph, node.target, fx.map_arg(node.args, mapping.__getitem__), node, dict(node.kwargs))
    h = mapping[motif.region]
    if len(shape(h) or ()) != 2:
        raise ValueError(f"the activation is not recognised ({why}) and does not work on rows of tokens")
    down = insert(graph, ops.expert_linear, (h, flat, w2, b2), like)
    by_token = insert(graph, aten.view.default, (down, [-1, top_k, hidden]), like)
    scale = insert(graph, aten.unsqueeze.default, (weights, -1), like)
    product = insert(graph, aten.mul.Tensor, (by_token, scale), like)
    total = insert(graph, aten.sum.dim_IntList, (product, [1]), like)
    return total if dtype(total) == dtype(x) else insert(graph, aten._to_copy.default, (total,), like, {"dtype": dtype(x)})


def _region_nodes(motif: Motif) -> list[fx.Node]:
    inside = ancestors([motif.region], stop={g.output for g in motif.first})
    return [n for n in motif.region.graph.nodes if n in inside]
