"""Drop what computes nothing, so that every later pass sees one spelling.

%c = aten._to_copy(%x, dtype=float32)   # x is float32 already       ->   %x
%v = aten.view(aten.view(%x, [-1, 64]), [-1, 64])                    ->   aten.reshape(%x, [-1, 64])
%d = aten.detach(%x), alias, clone, contiguous, dropout(p, False)    ->   %x
%m = aten.mul(%x, 1.0)                                               ->   %x
_assert_*, sym_constrain_*                                           ->   gone
the same pure call twice                                             ->   once
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from moefx.graph import aten, is_call, same_size, shape, value

_ASSERTS = ("_assert_tensor_metadata", "_assert_async", "_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size")
_SAME = frozenset({aten.alias.default, aten.detach.default, aten.clone.default, aten.contiguous.default})
_RESHAPES = frozenset({aten.reshape.default, aten.expand.default})
_CASTS = frozenset({aten._to_copy.default, aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.to.other})
_PURE_EXCEPT = ("rand", "dropout", "empty", "bernoulli", "multinomial", "item", "nonzero", "sym_constrain")


def run(graph: fx.Graph) -> None:
    """Rewrite `graph` in place; its values stay the same at every output."""
    _drop_asserts(graph)
    for node in list(graph.nodes):
        if is_call(node, {aten.view.default, aten._unsafe_view.default}):
            node.target = aten.reshape.default
        source = _same_as(node)
        if source is not None:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    _merge_equal_calls(graph)
    graph.eliminate_dead_code()
    graph.lint()


def _drop_asserts(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and getattr(node.target, "__name__", "").split(".")[0] in _ASSERTS:
            graph.erase_node(node)


def _same_as(node: fx.Node) -> fx.Node | None:
    """The node whose value `node` repeats, or None."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    source = node.args[0]
    old, new = value(source), value(node)
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return None
    if is_call(node, _SAME):
        return source
    if is_call(node, _CASTS) and old.dtype == new.dtype and old.device == new.device:
        return source
    if is_call(node, {aten.dropout.default}) and node.args[2] is False:
        return source
    if is_call(node, {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor}) and node.args[1] == 1.0 and not isinstance(node.args[1], fx.Node):
        return source if old.dtype == new.dtype else None
    if is_call(node, _RESHAPES):
        if _same_shape(source, node):
            return source
        inner = source.args[0] if is_call(source, {aten.reshape.default}) else None
        if inner is not None and not is_call(node, {aten.expand.default}):
            if _same_shape(inner, node):
                return inner
            node.args = (inner, *node.args[1:])
    if is_call(node, {aten.transpose.int}) and is_call(source, {aten.transpose.int}) and _axes(node) == _axes(source):
        return source.args[0]
    return None


def _axes(node: fx.Node) -> frozenset[int]:
    rank = len(shape(node) or ())
    return frozenset(a % rank for a in node.args[1:] if isinstance(a, int))


def _same_shape(a: fx.Node, b: fx.Node) -> bool:
    x, y = shape(a), shape(b)
    return x is not None and y is not None and len(x) == len(y) and all(same_size(i, j) for i, j in zip(x, y, strict=True))


def _merge_equal_calls(graph: fx.Graph) -> None:
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or any(word in str(node.target) for word in _PURE_EXCEPT):
            continue
        key = (node.target, _freeze(node.args), _freeze(node.kwargs))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _freeze(tree: Any) -> Any:
    if isinstance(tree, (list, tuple)):
        return tuple(_freeze(t) for t in tree)
    if isinstance(tree, dict):
        return tuple(sorted((k, _freeze(v)) for k, v in tree.items()))
    if isinstance(tree, slice):
        return ("slice", tree.start, tree.stop, tree.step)
    return (type(tree), tree)
