"""What the numbers of a trial cannot show, refused by structure: thresholds, fixed row counts, terms smaller than the rounding."""

from __future__ import annotations

from typing import Any

from torch import fx

from moefx.graph import ancestors, aten, is_call, line_of, shape, slice_of
from moefx.instance import is_float

_BOUNDS = ("clamp", "hardtanh", "minimum", "maximum", "fmin", "fmax", "nan_to_num", "tanh")
_COMPARISONS = ("gt", "ge", "lt", "le", "eq", "ne", "greater", "less", "threshold", "clamp_min", "clamp_max", *_BOUNDS)
_ARITHMETIC = ("add", "sub", "rsub", "mul", "div", "pow")
_SHAPES_ONLY = frozenset(
    {aten.zeros_like.default, aten.empty_like.default, aten.new_zeros.default, aten.new_empty.default, aten.full_like.default}
)


def unseen(x: fx.Node, ids: fx.Node, weights: fx.Node, output: fx.Node, inner: set[fx.Node], products: set[fx.Node]) -> str | None:
    """What lies between the cut (x, ids, weights) and `output` that no trial can rule out; None when nothing does.

    `inner` are the nodes of the expert MLPs, `products` the results of their second GEMM.
    """
    ends = {x, ids, weights}
    combine = ancestors([output], stop={*ends, *products})
    for node in ancestors([output], stop=ends) - ends - inner:
        if is_call(node, {aten.slice.Tensor}) and _shortens(node):
            return f"a slice keeps a fixed number of rows ({line_of(node)})"
        if _compares(node):
            return f"{_name(node)} compares floating values inside ({line_of(node)})"
        if node in combine and _scales(node):
            return f"{_name(node)} with a constant may be smaller than the rounding ({line_of(node)})"
    return _bypass(x, output, {ids, weights, *products})


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", "").split(".")[0]


def _shortens(node: fx.Node) -> bool:
    """A slice [a:b] with a constant b of a dim whose size is not constant."""
    source, dim, end = slice_of(node)
    return isinstance(end, int) and not isinstance((shape(source) or ())[dim], int)


def _compares(node: Any) -> bool:
    """A comparison of floating values with anything but zero, or a bound of any kind."""
    if node.op != "call_function" or _name(node) not in _COMPARISONS or not isinstance(node.args[0], fx.Node) or not is_float(node.args[0]):
        return False
    return _name(node) in _BOUNDS or len(node.args) < 2 or isinstance(node.args[1], fx.Node) or node.args[1] != 0


def _scales(node: fx.Node) -> bool:
    """Arithmetic of floating values with a constant other than 0 and 1: a factor of 1.001 is within the tolerance of a half type."""
    numbers = [a for a in node.args if isinstance(a, (int, float)) and not isinstance(a, bool)]
    return node.op == "call_function" and _name(node) in _ARITHMETIC and is_float(node) and not all(n in (0, 1) for n in numbers)


def _bypass(x: fx.Node, output: fx.Node, stop: set[fx.Node]) -> str | None:
    """Whether values of x reach the output beside the experts."""
    pending, seen = [output], set[fx.Node]()
    while pending:
        node = pending.pop()
        if node in seen or node in stop or is_call(node, _SHAPES_ONLY) or not is_float(node):
            continue
        seen.add(node)
        if node is x:
            return f"x itself reaches the output beside the experts ({line_of(output)})"
        pending += node.all_input_nodes
    return None
