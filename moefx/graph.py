"""What every pass needs of torch.fx: views, weight-only nodes, new nodes that keep their metadata.

A graph here is what `capture` returns: functional ATen with a FakeTensor in every `node.meta["val"]`, parameters and buffers as
placeholders marked `node.meta["weight"] = <qualified name>`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

VIEWS = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.default,
        aten.squeeze.dims,
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
        aten.alias.default,
        aten.detach.default,
        aten.contiguous.default,
        aten.clone.default,
        aten.flatten.using_ints,
        aten.movedim.int,
        aten.expand.default,
        aten.lift_fresh_copy.default,
    }
)
"""Ops that change the shape of a tensor and none of its values (`expand` repeats them)."""

CASTS = frozenset({aten._to_copy.default, aten.to.dtype, aten.to.dtype_layout, aten.type_as.default})


def value(node: Any) -> Any:
    """The FakeTensor (or SymInt, or tuple) a node stands for; None when unknown."""
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def shape(node: fx.Node) -> tuple[Any, ...] | None:
    """Sizes as ints and SymInts; None for what is no tensor."""
    val = value(node)
    return tuple(val.shape) if isinstance(val, torch.Tensor) else None


def dtype(node: fx.Node) -> torch.dtype | None:
    val = value(node)
    return val.dtype if isinstance(val, torch.Tensor) else None


def is_call(node: Any, targets: Iterable[Any]) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes are provably equal; adds no guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return isinstance(a == b, (bool, torch.SymBool)) and statically_known_true(a == b)


def last_dim(node: fx.Node) -> int:
    """The feature dim of a product [.., features] or [.., features, 1]."""
    sizes = shape(node) or ()
    return len(sizes) - 2 if len(sizes) > 2 and sizes[-1] == 1 else len(sizes) - 1


def features(node: fx.Node) -> int:
    sizes = shape(node) or (0,)
    return int(sizes[last_dim(node)])


def numel(sizes: Sequence[Any]) -> Any:
    total: Any = 1
    for size in sizes:
        total = total * size
    return total


def is_weight(node: fx.Node) -> bool:
    """A parameter or buffer of the traced block."""
    return node.op == "placeholder" and "weight" in node.meta


def weight_only(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose value depends on parameters, buffers and literals alone."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if is_weight(node) or node.op == "get_attr":
            found.add(node)
        elif node.op == "call_function" and isinstance(value(node), (torch.Tensor, tuple, list)):
            inputs = node.all_input_nodes
            if inputs and all(i in found for i in inputs):
                found.add(node)
    return found


def through_views(node: Any, also: frozenset[Any] = frozenset()) -> Any:
    """The node whose values `node` shows: up through views (and the ops in `also`)."""
    while is_call(node, VIEWS) or is_call(node, also):
        node = node.args[0]
    return node


def insert(
    graph: fx.Graph, target: Callable[..., Any], args: tuple[Any, ...], like: fx.Node, kwargs: dict[str, Any] | None = None
) -> fx.Node:
    """A new call at the insertion point, with `like`'s stack trace and module stack and its own fake value."""
    node = graph.call_function(target, args, kwargs or {})
    for key in ("stack_trace", "nn_module_stack"):
        if key in like.meta:
            node.meta[key] = like.meta[key]
    node.meta["val"] = fake_call(target, args, kwargs or {}, like)
    return node


def fake_call(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], like: fx.Node) -> Any:
    """`target` on the fake values of its argument nodes."""
    fakes = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    mode = fake_mode(like.graph)
    if mode is None:
        return target(*fakes[0], **fakes[1])
    with mode:
        return target(*fakes[0], **fakes[1])


def fake_mode(graph: fx.Graph) -> Any:
    """The FakeTensorMode behind a graph's values."""
    for node in graph.nodes:
        mode = getattr(value(node), "fake_mode", None)
        if mode is not None:
            return mode
    return None


def ancestors(roots: Iterable[fx.Node], stop: frozenset[fx.Node] | set[fx.Node] = frozenset()) -> set[fx.Node]:
    """`roots` and everything they are computed from; `stop` nodes are included but not looked behind."""
    seen: set[fx.Node] = set()
    todo = list(roots)
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node not in stop:
            todo.extend(node.all_input_nodes)
    return seen


def descendants(root: fx.Node) -> set[fx.Node]:
    """`root` and everything computed from it."""
    seen: set[fx.Node] = set()
    todo = [root]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo.extend(node.users)
    return seen


def extract(graph: fx.Graph, inputs: Sequence[fx.Node], output: fx.Node) -> tuple[fx.GraphModule, list[fx.Node]]:
    """The subgraph from `inputs` (the first one [.., T, width]) to `output` as a module, and the weights it takes after `inputs`, in order.

    Sizes read from other inputs of the block are rebuilt from the number of tokens of the first input. What the subgraph needs besides
    must be weights; ValueError names what else it needs.
    """
    total = numel((shape(inputs[0]) or ())[:-1])
    inside = region([output], inputs, total)
    weights = [n for n in graph.nodes if n in inside and is_weight(n) and n not in inputs]
    new, mapping = fx.Graph(), {}
    for node in [*inputs, *weights]:
        mapping[node] = new.placeholder(node.name)
    tokens = _token_count(new, mapping[inputs[0]], len(shape(inputs[0]) or ()))
    for node in graph.nodes:
        if node in inside and node not in mapping:
            ratio = _ratio(node, total)
            if ratio is not None:
                times = tokens if ratio.p == 1 else new.call_function(operator.mul, (tokens, int(ratio.p)))
                mapping[node] = times if ratio.q == 1 else new.call_function(operator.floordiv, (times, int(ratio.q)))
            elif node.op == "placeholder":
                raise ValueError(f"the region also depends on {node.name}")
            else:
                mapping[node] = new.node_copy(node, lambda n: mapping[n])
    new.output(mapping[output])
    owner = graph.owning_module
    attributes = {n.target: getattr(owner, n.target) for n in new.nodes if n.op == "get_attr"}
    return fx.GraphModule(attributes, new), weights


def _token_count(new: fx.Graph, x: fx.Node, rank: int) -> fx.Node:
    count = new.call_function(aten.sym_size.int, (x, 0))
    for d in range(1, rank - 1):
        count = new.call_function(operator.mul, (count, new.call_function(aten.sym_size.int, (x, d))))
    return count


def region(outputs: Iterable[fx.Node], inputs: Iterable[fx.Node], total: Any) -> set[fx.Node]:
    """What lies between `inputs` and `outputs`; a size that is a multiple of the number of tokens `total` is an input of its own."""
    roots = list(outputs)
    sizes = {n for n in roots[0].graph.nodes if _ratio(n, total) is not None}
    return ancestors(roots, stop=set(inputs) | sizes)


def _ratio(node: fx.Node, total: Any) -> Any:
    """The rational c with size = c * total; None for what is no size or no multiple."""
    if not isinstance(value(node), torch.SymInt) or not isinstance(total, torch.SymInt):
        return None
    size, tokens = value(node).node.expr, total.node.expr
    if not size.free_symbols <= tokens.free_symbols:
        return None
    ratio = (size / tokens).simplify()
    return ratio if ratio.is_Rational else None


def slice_of(node: Any) -> tuple[fx.Node, int, Any]:
    """(source, dim, end) of an aten.slice.Tensor call; end is None where the slice goes to the end."""
    source, dim, _, end = (*node.args, *(0, None, None)[len(node.args) - 1 :])[:4]
    return source, dim, None if isinstance(end, int) and end >= 2**62 else end


def line_of(node: fx.Node | None) -> str:
    """Where the model's source wrote this node: "file.py:12", or "" when unknown."""
    trace = (node.meta.get("stack_trace") or "") if node is not None else ""
    lines = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    if not lines:
        return ""
    path, _, rest = lines[-1].removeprefix('File "').partition('", line ')
    return f"{path.rsplit('/', 1)[-1]}:{rest.split(',')[0]}"


def getitem_source(node: fx.Node) -> tuple[fx.Node, int] | None:
    """(tuple node, position) of an `operator.getitem` on a multi-output op."""
    if node.op == "call_function" and node.target is operator.getitem:
        return node.args[0], node.args[1]
    return None


def text(graph: fx.Graph) -> str:
    """The graph for people: one line a node, weights by their qualified names, results numbered, sizes and metadata left out."""
    names: dict[fx.Node, str] = {}
    lines = []
    for node in graph.nodes:
        if node.op == "placeholder":
            names[node] = node.meta["weight"] if is_weight(node) else f"%{node.target}"
        elif node.op == "get_attr":
            names[node] = f"%{node.target}"
        elif node.op == "output":
            lines.append(f"return {_written(node.args[0], names)}")
        else:
            names[node] = f"%{len(lines)}"
            arguments = [_written(a, names) for a in node.args] + [f"{k}={_written(v, names)}" for k, v in node.kwargs.items()]
            lines.append(f"{names[node]} = {_called(node.target)}({', '.join(arguments)})")
    return "\n".join(lines)


def _called(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        space, _, name = str(target).rpartition("::")[2].partition(".")
        return f"{space}.{name.removesuffix('.default')}"
    return getattr(target, "__name__", str(target))


def _written(item: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(item, fx.Node):
        return names[item]
    if isinstance(item, (list, tuple)):
        inner = ", ".join(_written(i, names) for i in item)
        return f"[{inner}]" if isinstance(item, list) else f"({inner})"
    return str(item).removeprefix("torch.") if isinstance(item, torch.dtype) else repr(item)
