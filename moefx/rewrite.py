"""One block from module to rewritten forward: capture -> normalise -> raise -> plan -> fuse -> shard -> lower -> hoist -> check."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from moefx.capture import Capture, CaptureError, SizeBranchError, capture
from moefx.decision import Decision
from moefx.discover import Candidate, example_arguments
from moefx.graph import dtype, is_weight, text
from moefx.layer import Layer, Shared
from moefx.options import Options
from moefx.packs import Pack, WeightRef
from moefx.passes import (
    fuse_shared_expert,
    hoist_weights,
    localize_weights,
    lower_experts,
    normalize,
    pad_experts,
    raise_experts,
    raise_shared_expert,
    shard_experts,
)
from moefx.passes.raise_experts import Raised
from moefx.passes.raise_shared_expert import RaisedShared
from moefx.reports import LayerRecord
from moefx.swap import BlockForward, stripped
from moefx.verify import region_differs


@dataclass
class Traced:
    """A captured block in canonical form, before any decision. `whole`: the block itself, not the experts' own module inside it."""

    capture: Capture
    routed: Raised
    shared: RaisedShared | None
    layer: Layer
    whole: bool = True


@dataclass
class Lowered:
    """A block's graph with kernel calls; `hoisted` packs its weights, `local` says what a rank keeps."""

    graph: fx.GraphModule
    hoisted: hoist_weights.Hoisted
    local: localize_weights.Localized | None


@dataclass(frozen=True)
class Ranks:
    """This process's place in a process group; None where ranks are virtual."""

    rank: int
    group_name: str


def trace(candidate: Candidate, options: Options, example: Mapping[str, Any] | None, execute: bool) -> Traced | LayerRecord:
    """The block in canonical form, or the record of why it is left alone. `execute`: weights are real, so the raise is tried on numbers."""
    started = time.perf_counter()
    captured = _capture(candidate, example)
    if isinstance(captured, str):
        return LayerRecord(candidate.name, False, reason=captured, seconds=time.perf_counter() - started)
    graph = captured.graph.graph
    before = text(graph)
    if "normalize" not in options.disable:
        normalize.run(graph)
    tensors = {
        **dict(candidate.module.named_parameters(remove_duplicate=False)),
        **dict(candidate.module.named_buffers(remove_duplicate=False)),
    }

    def trial(g: fx.Graph, cut: Any, new: fx.Node, layer: Raised) -> str | None:
        return region_differs(g, cut, new, layer, tensors.__getitem__) if execute else None

    if "raise_experts" in options.disable:
        return LayerRecord(candidate.name, False, reason="the pass raise_experts is disabled", seconds=time.perf_counter() - started)
    raised, reasons = raise_experts.run(graph, trial)
    if len(raised) != 1:
        reason = "; ".join(reasons) if not raised else f"{len(raised)} groups of routed experts in one block"
        return LayerRecord(candidate.name, False, form="opaque", reason=reason, seconds=time.perf_counter() - started, before=before)
    routed = raised[0]
    shared = raise_shared_expert.run(graph, routed) if "raise_shared_expert" not in options.disable else None
    return Traced(captured, routed, shared, layer_of(candidate.name, routed, shared))


def _capture(candidate: Candidate, example: Mapping[str, Any] | None) -> Capture | str:
    """The capture, trying the example given, else hidden states of rank 3, then 2; a string says why none worked."""
    reasons: list[str] = []
    device = next((p.device for p in candidate.module.parameters()), torch.device("cpu"))
    for rank in (3, 2) if example is None else (0,):
        try:
            values = example if example is not None else example_arguments(candidate, rank, device)
            return capture(candidate.module, (), values, candidate.experts)
        except SizeBranchError as error:
            return str(error)
        except (CaptureError, ValueError) as error:
            reasons.append(str(error))
    return reasons[0]


def layer_of(name: str, routed: Raised, shared: RaisedShared | None) -> Layer:
    """The raised block as the plan sees it."""
    node = routed.node
    weight = node.args[3] if routed.opaque_reason is None else next(n for n in node.graph.nodes if "expert_linear" in str(n.target)).args[2]
    format_ = str(dtype(weight)).removeprefix("torch.")
    found = None
    if shared is not None:
        own = dtype(shared.node.args[2]) if shared.node is not None else dtype(weight)
        found = Shared(shared.intermediate, shared.gate, shared.activation, str(own).removeprefix("torch."), shared.bias)
    why = shared.why_unfused if shared is not None else None
    if shared is not None and routed.opaque_reason is not None:
        why = why or "the routed experts' activation is kept as it was, outside a kernel"
    return Layer(
        name,
        routed.form,
        routed.experts,
        routed.intermediate,
        routed.hidden,
        routed.top_k,
        routed.activation,
        str(dtype(routed.x)).removeprefix("torch."),
        format_,
        routed.bias,
        found,
        why,
    )


def lower(traced: Traced, decision: Decision, options: Options, ranks: Ranks | None, reference: bool = False) -> Lowered:
    """A new graph in which the decision is carried out; `traced` stays as it is."""
    module = _copy(traced.capture.graph)
    graph = module.graph
    names = {n.name: n for n in graph.nodes}
    routed = replace(traced.routed, node=names[traced.routed.node.name])
    before = {n.meta["weight"] for n in graph.nodes if is_weight(n) and n.users}
    local = None
    if routed.opaque_reason is None:
        node = routed.node
        if decision.placement == "fused" and traced.shared is not None and traced.shared.node is not None:
            shared = replace(traced.shared, node=names[traced.shared.node.name], join=names[traced.shared.join.name])
            node = fuse_shared_expert.run(graph, routed, shared)
        nodes = shard_experts.run(graph, node, routed.experts, options, ranks.rank if ranks else None, ranks.group_name if ranks else None)
        assert decision.kernel is not None
        if ranks is not None:
            local = localize_weights.run(graph, before)
        if decision.pad:
            nodes = pad_experts.run(graph, nodes, decision.pad)
        lower_experts.run(graph, nodes, decision.kernel, reference, decision.guard, decision.otherwise)
    hoisted = hoist_weights.run(graph)
    for unused in [n for n in graph.nodes if is_weight(n) and not n.users]:
        graph.erase_node(unused)
    module.recompile()
    return Lowered(module, hoisted, local)


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, mapping))
    for old, new in mapping.items():
        new.meta = dict(old.meta)
        new.name = old.name
        new._rename(old.name)
    attributes = {n.target: getattr(module, n.target) for n in graph.nodes if n.op == "get_attr"}
    return fx.GraphModule(attributes, graph)


def build_forward(block: nn.Module, traced: Traced, lowered: Lowered) -> BlockForward:
    """The block's new forward over its own parameters."""
    graph = lowered.graph.graph
    rows = lowered.local.rows if lowered.local is not None else {}
    weights = [
        WeightRef(block, w, rows.get(w)) for w in (n.meta["weight"] for n in graph.nodes if n.op == "placeholder" and "weight" in n.meta)
    ]
    pack = None
    if lowered.hoisted.pack is not None:
        pack = Pack(stripped(lowered.hoisted.pack), [WeightRef(block, s, rows.get(s)) for s in lowered.hoisted.sources])
    c = traced.capture
    return BlockForward(
        block,
        stripped(lowered.graph),
        weights,
        pack,
        c.names,
        c.constants,
        c.inputs,
        c.flat_outputs,
        c.out_spec,
        lowered.local is not None,
    )
