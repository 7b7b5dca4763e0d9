"""`torch.compile(model, backend="moefx", options={...})`: the same passes inside torch.compile, Inductor for the rest.

Each mixture-of-experts block of the graph Dynamo traced is cut out before autograd, traced again to the ATen form that `optimize` sees,
raised, planned and lowered, and put back. What is not rewritten goes to Inductor as it was. Weights are graph inputs here and are not
repacked: a layer that needs packed weights is left alone with that reason (use `moefx.optimize` first, then torch.compile).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from moefx.decision import decide
from moefx.graph import aten, is_weight, shape
from moefx.kernels import registry as _kernels  # noqa: F401  a cached graph calls their ops
from moefx.options import A2A, PRECISIONS, TARGETS, Options, check_choice, check_ep_size, resolve_a2a
from moefx.reports import LayerRecord

ALLOWED = ("ep_size", "a2a", "precision", "target", "disable")
RECORDS: list[tuple[Any, Options, LayerRecord]] = []
"""(weak reference to a weight of the layer, options, record) of every layer seen by a compile in this process."""

_UNPACKED = "weights are not repacked inside torch.compile; call moefx.optimize(model) first and compile its result"


def moefx_backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The backend; `options` are those of `moefx.optimize` named in ALLOWED, ValueError for any other."""
    from torch._inductor.compile_fx import compile_fx

    if mode is not None:
        raise ValueError(f"backend 'moefx' takes options, not mode={mode!r}; use options={{...}} with {', '.join(ALLOWED)}")
    found = _options(options or {}, example_inputs)
    tensors = {
        n.name: t
        for n, t in zip((n for n in gm.graph.nodes if n.op == "placeholder"), example_inputs, strict=False)
        if isinstance(t, torch.Tensor)
    }
    return compile_fx(gm, list(example_inputs), config_patches={"pre_grad_custom_pass": _pass(found, tensors)})


def _options(given: Mapping[str, Any], inputs: Sequence[Any]) -> Options:
    unknown = sorted(set(given) - set(ALLOWED))
    if unknown:
        raise ValueError(f"backend 'moefx' has no option {', '.join(map(repr, unknown))}; the options are {', '.join(ALLOWED)}")
    ep_size, a2a, precision, target = (
        given.get("ep_size", 1),
        given.get("a2a", "auto"),
        given.get("precision", "preserve"),
        given.get("target"),
    )
    check_ep_size(ep_size)
    check_choice("a2a", a2a, A2A)
    check_choice("precision", precision, PRECISIONS)
    if target is not None:
        check_choice("target", target, TARGETS)
    if target is None:
        target = "sm90" if any(isinstance(t, torch.Tensor) and t.is_cuda for t in inputs) else "cpu"
    return Options(ep_size, resolve_a2a(a2a, ep_size, False), precision, target, tuple(given.get("disable", ())))


def _pass(options: Options, tensors: dict[str, torch.Tensor]) -> Any:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class RewriteExperts(CustomGraphPass):
        """Runs before autograd on the whole graph. Without a uuid torch runs it before it looks into its caches, on every compile: what
        is cached is the rewritten graph, and the records are never missing."""

        def __call__(self, graph: fx.Graph) -> None:
            rewrite(graph, options, tensors)

        def uuid(self) -> None:
            return None

    return RewriteExperts()


def rewrite(graph: fx.Graph, options: Options, tensors: dict[str, torch.Tensor]) -> None:
    """Rewrite every mixture-of-experts block of a pre-autograd graph in place, and note each in RECORDS."""
    differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in tensors.values())
    for name, nodes in _regions(graph):
        weights = [
            i for n in nodes for i in n.all_input_nodes if i.op == "placeholder" and isinstance(tensors.get(i.name), torch.nn.Parameter)
        ]
        if differentiated:
            record = LayerRecord(name, False, reason="the graph needs gradients and moefx has no backward")
        else:
            record = _rewrite_region(graph, name, nodes, options, tensors)
        if weights:
            RECORDS.append((weakref.ref(tensors[weights[0].name]), options, record))


def _regions(graph: fx.Graph) -> list[tuple[str, list[fx.Node]]]:
    """(module path, nodes) of every block that holds grouped GEMMs: the module around the experts."""
    blocks: dict[str, None] = {}
    for node in graph.nodes:
        if node.op == "call_function" and "grouped_mm" in str(getattr(node.target, "__name__", node.target)):
            stack = list((node.meta.get("nn_module_stack") or {}).keys())
            if stack:
                blocks[stack[-2] if len(stack) > 1 else stack[-1]] = None
    found = []
    for key in blocks:
        nodes = [n for n in graph.nodes if key in (n.meta.get("nn_module_stack") or {}) and n.op not in ("placeholder", "output")]
        path = next(n.meta["nn_module_stack"][key][0] for n in nodes)
        found.append((_readable(path), nodes))
    return found


def _readable(path: str) -> str:
    """L['self']._modules['model']... -> model.layers.0.mlp."""
    parts = path.replace("._modules", "").replace("L['self']", "").replace("['", ".").replace("']", "")
    return parts.replace("[", ".").replace("]", "").strip(".")


def _rewrite_region(graph: fx.Graph, name: str, nodes: list[fx.Node], options: Options, tensors: dict[str, torch.Tensor]) -> LayerRecord:
    from moefx.passes import lower_experts, normalize, raise_experts, raise_shared_expert, shard_experts
    from moefx.rewrite import layer_of
    from moefx.verify import region_differs

    inside = set(nodes)
    inputs = list(dict.fromkeys(i for n in nodes for i in n.all_input_nodes if i not in inside))
    outputs = [n for n in nodes if any(u not in inside for u in n.users)]
    if any(_later(graph, i, nodes[0]) for i in inputs):
        return LayerRecord(name, False, reason="other computations lie between the block's own")
    try:
        traced, kept = _retrace(graph, nodes, inputs, outputs)
    except (RuntimeError, ValueError, KeyError, AssertionError) as error:
        return LayerRecord(
            name,
            False,
            reason=f"the block could not be traced again: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
        )
    for placeholder, source in kept.items():
        if isinstance(tensors.get(source.name), torch.nn.Parameter):
            placeholder.meta["weight"] = source.name
    small = traced.graph
    normalize.run(small)
    raised, reasons = raise_experts.run(small, lambda g, cut, new, layer: region_differs(g, cut, new, layer, tensors.__getitem__))
    if len(raised) != 1:
        return LayerRecord(name, False, form="opaque", reason="; ".join(reasons) or f"{len(raised)} groups of routed experts in one block")
    shared = raise_shared_expert.run(small, raised[0])
    layer = replace(layer_of(name, raised[0], shared), shared_why_unfused=_UNPACKED)
    rows = (shape(raised[0].x) or (None,))[0]
    options = replace(options, disable=(*options.disable, "pad_experts"), tokens=rows if isinstance(rows, int) else None)
    decision = decide(layer, _without_packing(options), guards=False)
    record = LayerRecord(
        name, False, raised[0].form, decision.reason, layer, decision, rounding=raised[0].rounding, opaque_reason=raised[0].opaque_reason
    )
    if decision.kernel is None:
        return record
    if raised[0].opaque_reason is None:
        parts = shard_experts.run(small, raised[0].node, raised[0].experts, options)
        if decision.kernel.lossy or any(not _is_view(w) for p in parts for w in p.args[3:7] if isinstance(w, fx.Node)):
            record.reason = _UNPACKED
            return record
        lower_experts.run(small, parts, decision.kernel)
    _splice(graph, small, kept, outputs, inside)
    record.rewritten = True
    return record


def _without_packing(options: Options) -> Options:
    """Weights stay as they lie, so the kernels of the model's own precision that want them packed are out."""
    from moefx.kernels.registry import KERNELS

    return replace(options, disable=(*options.disable, *(k.name for k in KERNELS if k.packs and not k.lossy)))


def _is_view(node: fx.Node) -> bool:
    while not is_weight(node):
        if node.target not in (aten.transpose.int, aten.slice.Tensor, aten.t.default, aten.permute.default, aten.reshape.default):
            return False
        node = node.args[0]
    return True


def _later(graph: fx.Graph, node: fx.Node, first: fx.Node) -> bool:
    """Whether an input is computed after the block begins (then the block can't be put in one place)."""
    for other in graph.nodes:
        if other is node:
            return False
        if other is first:
            return True
    return False


def _retrace(
    graph: fx.Graph, nodes: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node]
) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """The block in functional ATen, and which outer node each of its placeholders stands for."""
    from torch._functorch.aot_autograd import aot_export_module

    new, mapping = fx.Graph(), {}
    for node in inputs:
        mapping[node] = new.placeholder(node.name)
    for node in nodes:
        mapping[node] = new.node_copy(node, mapping.__getitem__)
    new.output(tuple(mapping[n] for n in outputs))
    owner = graph.owning_module
    module = fx.GraphModule(owner if owner is not None else torch.nn.Module(), new)
    examples = [n.meta["example_value"] for n in inputs]
    mode = next(e.fake_mode for e in examples if hasattr(e, "fake_mode"))
    with torch.no_grad(), mode:
        traced, _ = aot_export_module(module, examples, trace_joint=False, pre_dispatch=True)
    placeholders = [n for n in traced.graph.nodes if n.op == "placeholder"]
    return traced, dict(zip(placeholders, inputs, strict=True))


def _splice(graph: fx.Graph, small: fx.Graph, kept: dict[fx.Node, fx.Node], outputs: list[fx.Node], inside: set[fx.Node]) -> None:
    mapping = {p: source for p, source in kept.items()}
    anchor = outputs[-1]
    users = {o: [u for u in o.users if u not in inside] for o in outputs}
    with graph.inserting_after(anchor):
        point = graph.call_function(torch.ops.aten.sym_size.int, (next(iter(kept.values())), 0))
    with graph.inserting_before(point):
        for node in small.nodes:
            if node.op not in ("placeholder", "output"):
                mapping[node] = graph.node_copy(node, mapping.__getitem__)
                mapping[node].meta["example_value"] = node.meta.get("val")
    graph.erase_node(point)
    result = next(n for n in small.nodes if n.op == "output").args[0]
    for old, new in zip(outputs, result, strict=True):
        for user in users[old]:
            user.replace_input_with(old, mapping[new] if isinstance(new, fx.Node) else new)
    graph.eliminate_dead_code()
    graph.lint()
