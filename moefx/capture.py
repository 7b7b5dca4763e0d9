"""Trace one mixture-of-experts block to functional ATen with a dynamic number of tokens.

The module stays as it is: the trace runs on fake tensors, and what it switches for its time (the experts form of a Hugging Face block)
is put back. The graph's parameters and buffers are placeholders that carry their qualified name (`node.meta["weight"]`), its user
inputs placeholders in the order of `Capture.names`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree
from torch.utils._sympy.numbers import int_oo

from moefx._compat import quiet_export_logs
from moefx.graph import aten, is_call, line_of, same_size, shape, slice_of

_OPEN_UP = (
    aten.einsum.default,
    aten.matmul.default,
    aten.chunk.default,
    aten.tensor_split.sections,
    aten.unflatten.int,
    aten.inner.default,
)
"""Composite ops that hide a GEMM or a column map: taken apart so that one set of passes sees them."""


class CaptureError(Exception):
    """A block that can't be traced; the text says why. `optimize` turns it into a reason in the report."""


class SizeBranchError(CaptureError):
    """A block that computes something else for other numbers of tokens: no single trace holds."""


@dataclass(frozen=True)
class Capture:
    """One traced block.

    `names` are the forward parameters in order; `constants[name]` holds the value of every one that was no tensor (the trace read it);
    the others are the graph's user inputs, in order. `out_spec` rebuilds the block's return structure from the graph's flat outputs,
    `constant_outputs` gives the flat outputs that are no tensors.
    """

    graph: fx.GraphModule
    names: tuple[str, ...]
    constants: Mapping[str, Any]
    out_spec: pytree.TreeSpec
    flat_outputs: tuple[Any, ...]  # per flat output: None for the next graph output, or ("const", value)
    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)  # the example tensors


def capture(block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], num_experts: int | None = None) -> Capture:
    """Trace `block(*args, **kwargs)`; raises CaptureError with the reason when no way of tracing works.

    `num_experts`, when known, lets loops over experts be made total (`moefx.loops`).
    """
    bound = inspect.signature(type(block).forward).bind(block, *args, **kwargs)
    bound.apply_defaults()
    values = dict(list(bound.arguments.items())[1:])
    parameters = inspect.signature(type(block).forward).parameters
    for name in [n for n, p in parameters.items() if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]:
        if values.pop(name, None):
            raise CaptureError(f"the block was called with extra arguments through *{name}, which moefx does not trace")
    names = tuple(values)
    tensors = {n: v for n, v in values.items() if isinstance(v, torch.Tensor)}
    constants = {n: v for n, v in values.items() if n not in tensors}
    for name, constant in constants.items():
        if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(constant)):
            raise CaptureError(f"argument {name!r} holds tensors inside a {type(constant).__name__}, which moefx does not trace")
    dynamic = _dynamic_dims(values)
    program = _export(block, values, dynamic, num_experts)
    return _from_program(program, names, constants, tensors)


def _dynamic_dims(values: Mapping[str, Any]) -> dict[str, dict[int, Any] | None]:
    """Token dims: every dim of an integer tensor (ids, masks), all but the last of a floating one (hidden states).

    Tensors with the same leading sizes share them by name, so that token ids and hidden states have provably as many tokens.
    """
    leads = {n: tuple(v.shape[: v.dim() - (1 if v.is_floating_point() else 0)]) for n, v in values.items() if isinstance(v, torch.Tensor)}
    if len(leads) == 1:
        return {n: dict.fromkeys(range(len(leads[n])), Dim.DYNAMIC) if n in leads else None for n in values}
    known: dict[int, Any] = {}
    found: dict[str, dict[int, Any] | None] = {}
    for name in values:
        if name not in leads:
            found[name] = None
            continue
        found[name] = {d: known.setdefault(size, Dim(f"tokens_{size}")) for d, size in enumerate(leads[name]) if _is_lead(size, leads)}
    return found


def _is_lead(size: int, leads: Mapping[str, tuple[int, ...]]) -> bool:
    """A size that leads some tensor's shape is a number of tokens; what only follows (top-k) is not."""
    first = next(iter(leads.values()))
    return size in first


def _export(block: nn.Module, values: dict[str, Any], dynamic: dict[str, Any], num_experts: int | None) -> ExportedProgram:
    from moefx.loops import PortableGroupedMm, UntraceableError, call_arguments, call_shapes, export_total

    known = torch.export.default_decompositions()
    table = {op: known[op] for op in _OPEN_UP if op in known}
    with torch.no_grad(), grouped_experts(block), quiet_export_logs():
        try:
            with PortableGroupedMm():
                return torch.export.export(
                    block, *call_arguments(block, values), dynamic_shapes=call_shapes(block, dynamic), strict=False
                ).run_decompositions(table)
        except Exception as error:  # noqa: BLE001  export raises nearly every type there is; all mean "not traceable this way"
            if num_experts is None:
                raise CaptureError(f"torch.export: {first_line(error)}") from error
            plain = first_line(error)
        try:
            return export_total(block, values, num_experts=num_experts, dynamic_shapes=dynamic, table=table)
        except UntraceableError as why:
            raise CaptureError(f"torch.export: {plain}; with the expert loop made total: {first_line(why)}") from why


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


@contextlib.contextmanager
def grouped_experts(block: nn.Module) -> Iterator[None]:
    """Hugging Face experts run their `grouped_mm` form inside (the eager loop can't be exported); restored after."""
    configs = {id(m.config): m.config for m in block.modules() if hasattr(getattr(m, "config", None), "_experts_implementation")}
    before = {key: config._experts_implementation for key, config in configs.items()}
    try:
        for config in configs.values():
            config._experts_implementation = "grouped_mm"
        yield
    finally:
        for key, config in configs.items():
            config._experts_implementation = before[key]


def _from_program(program: ExportedProgram, names: tuple[str, ...], constants: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Capture:
    signature, graph = program.graph_signature, program.graph_module.graph
    _check_any_size(program)
    placeholders = {n.name: n for n in graph.nodes if n.op == "placeholder"}
    attributes: dict[str, Any] = {}
    for spec in signature.input_specs:
        node = placeholders[spec.arg.name]
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            node.meta["weight"] = spec.target
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            _to_attribute(program.graph_module, node, program.constants[spec.target], attributes)
        elif spec.kind is not InputKind.USER_INPUT:
            raise CaptureError(f"the trace has an input of kind {spec.kind.name}, which moefx does not rewrite")
    for out in signature.output_specs:
        if out.kind is not OutputKind.USER_OUTPUT:
            raise CaptureError(f"the block changes {out.target or 'an input'} in place ({out.kind.name})")
    user = [s.arg.name for s in signature.input_specs if s.kind is InputKind.USER_INPUT]
    for name in user:
        if name in placeholders and not placeholders[name].users and not isinstance(placeholders[name].meta.get("val"), torch.Tensor):
            graph.erase_node(placeholders[name])
    flat = tuple(
        ("const", s.arg.value) if not isinstance(getattr(s.arg, "name", None), str) or hasattr(s.arg, "value") else None
        for s in signature.output_specs
    )
    output = next(n for n in graph.nodes if n.op == "output")
    output.args = (tuple(a for a, const in zip(output.args[0], flat, strict=True) if const is None),)
    out_spec = program.call_spec.out_spec
    assert out_spec is not None
    for key, child in program.graph_module.named_children():
        attributes.setdefault(key, child)
    return Capture(fx.GraphModule(attributes, graph), names, constants, out_spec, flat, tensors)


def _check_any_size(program: ExportedProgram) -> None:
    """The trace must hold for every number of tokens: no upper bound, no lower bound beyond the 0/1 that export sets apart."""
    for symbol, bounds in program.range_constraints.items():
        if str(symbol).startswith("s") and (bounds.upper != int_oo or bounds.lower > 2):
            raise SizeBranchError(
                f"the block takes another way outside {bounds.lower}..{bounds.upper} tokens ({symbol}), and a trace holds only one"
            )
    for node in program.graph.nodes:
        if is_call(node, {aten.slice.Tensor}) and _assumes_length(node):
            raise SizeBranchError(f"a slice keeps a fixed number of rows, and the trace took another number for granted ({line_of(node)})")


def _assumes_length(node: Any) -> bool:
    """A slice with a constant end of a dim of any size, whose result the trace takes to be that dim itself or the constant."""
    source, dim, end = slice_of(node)
    size, kept = (shape(source) or ())[dim], (shape(node) or ())[dim]
    return isinstance(end, int) and not isinstance(size, int) and (isinstance(kept, int) or same_size(size, kept))


def _to_attribute(module: fx.GraphModule, node: fx.Node, constant: torch.Tensor, attributes: dict[str, Any]) -> None:
    """A constant the trace lifted becomes an attribute of the graph module again: it is no input of the block."""
    graph, name = node.graph, f"constant_{node.name}"
    attributes[name] = constant
    module.register_buffer(name, constant)
    with graph.inserting_before(_first_call(graph)):
        new = graph.get_attr(name)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _first_call(graph: fx.Graph) -> fx.Node:
    return next(n for n in graph.nodes if n.op != "placeholder")
