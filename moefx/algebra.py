"""Sound algebra over ranges: sympy's signs and torch's interval arithmetic. True only when shown."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from moefx.prove import Range, align, free_names, truth

Values = Mapping[str, Any]


class _NotShownError(Exception):
    """The expression is beyond what the algebra decides soundly."""


def defined(tree: ast.expr, values: Values) -> bool:
    """Whether no divisor is zero anywhere in range; a proof of one part says nothing where another part divides by zero."""
    divisors = [n.right for n in ast.walk(tree) if isinstance(n, ast.BinOp) and isinstance(n.op, (ast.FloorDiv, ast.Mod))]
    divisors += [n.args[1] for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "align"]
    try:
        return all(_to_sympy(branch, values).is_nonzero for d in divisors for branch in _branches(d))
    except _NotShownError:
        return False


def holds_everywhere(tree: ast.expr, values: Values) -> bool:
    if isinstance(tree, ast.BoolOp):
        return (all if isinstance(tree.op, ast.And) else any)(holds_everywhere(v, values) for v in tree.values)
    if not isinstance(tree, ast.Compare):
        return False
    if not any(isinstance(values[n], Range) for n in free_names(tree)):
        return truth(tree, values)
    ends = [tree.left, *tree.comparators]
    return all(_pair_holds(op, a, b, values) for op, a, b in zip(tree.ops, ends, ends[1:], strict=False))


def _pair_holds(op: ast.cmpop, a: ast.expr, b: ast.expr, values: Values) -> bool:
    """min and max are one of their arguments: what holds for each choice of them holds. Where it does not, their bounds may show it."""
    try:
        if all(_holds(op, _to_sympy(p, values), _to_sympy(q, values)) for p, q in _choices(a, b)):
            return True
        return _by_bounds(op, _to_sympy(a, values, True), _to_sympy(b, values, True), values)
    except _NotShownError:
        return False


def _choices(a: ast.expr, b: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    return itertools.product(_branches(a), _branches(b))


def _branches(tree: ast.expr) -> list[ast.expr]:
    """The tree with each min and max replaced by one of its arguments, in every way."""
    call = next(
        (n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id in ("min", "max")), None
    )
    if call is None:
        return [tree]
    return [branch for argument in call.args for branch in _branches(_with(tree, call, argument))]


def _with(tree: ast.expr, old: ast.AST, new: ast.expr) -> ast.expr:
    class Swap(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            return new if node is old else self.generic_visit(node) if not isinstance(node, ast.Name) else node

    import copy

    memo: dict[int, Any] = {id(old): old}
    return Swap().visit(copy.deepcopy(tree, memo))


def _to_sympy(tree: ast.expr, values: Values, whole: bool = False) -> Any:
    """A dim in steps of m is m times a nonnegative integer; // and % are torch's FloorDiv and Mod. `whole`: min and max stay."""
    import sympy
    from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod

    if isinstance(tree, (ast.Constant, ast.Name)):
        return _leaf(tree, values)
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        return -_to_sympy(tree.operand, values, whole)
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name):
        a, b = (sympy.expand(_to_sympy(v, values, whole)) for v in tree.args)
        if tree.func.id == "align":
            if not b.is_positive:
                raise _NotShownError
            return FloorDiv(sympy.expand(a + b - 1), b) * b
        if not whole:
            raise _NotShownError
        return (Min if tree.func.id == "min" else Max)(a, b)
    if not isinstance(tree, ast.BinOp):
        raise _NotShownError
    a, b = sympy.expand(_to_sympy(tree.left, values, whole)), sympy.expand(_to_sympy(tree.right, values, whole))
    if isinstance(tree.op, (ast.FloorDiv, ast.Mod)):
        if a.is_Integer and b.is_Integer and b != 0:
            return sympy.Integer(int(a) // int(b) if isinstance(tree.op, ast.FloorDiv) else int(a) % int(b))
        if not b.is_positive:  # torch's Mod is nonnegative whatever the divisor's sign; its FloorDiv merges nested divisors
            raise _NotShownError
    operations = {
        ast.Add: lambda: a + b,
        ast.Sub: lambda: a - b,
        ast.Mult: lambda: a * b,
        ast.FloorDiv: lambda: FloorDiv(a, b),
        ast.Mod: lambda: Mod(a, b),
    }
    return operations[type(tree.op)]()


def _leaf(tree: ast.Constant | ast.Name, values: Values) -> Any:
    import sympy

    value = tree.value if isinstance(tree, ast.Constant) else values[tree.id]
    if isinstance(value, int):
        return sympy.Integer(value)
    if not isinstance(tree, ast.Name) or not isinstance(value, Range):
        raise _NotShownError
    step = value.multiple_of
    return step * (align(value.minimum, step) // step + sympy.Symbol(tree.id, integer=True, nonnegative=True))


def _holds(op: ast.cmpop, a: Any, b: Any) -> bool:
    """By signs alone: upper bounds of ranges are not used."""
    import sympy

    difference = sympy.expand(a - b)
    if isinstance(op, ast.Eq):
        return difference == 0
    if isinstance(op, ast.NotEq):
        return bool(difference.is_positive or difference.is_negative)
    facts = {
        ast.GtE: difference.is_nonnegative,
        ast.Gt: difference.is_positive,
        ast.LtE: difference.is_nonpositive,
        ast.Lt: difference.is_negative,
    }
    return bool(facts.get(type(op)))


def _by_bounds(op: ast.cmpop, a: Any, b: Any, values: Values) -> bool:
    """By intervals of both sides and of their difference, upper bounds included."""
    import sympy

    low_a, high_a = _interval(a, values)
    low_b, high_b = _interval(b, values)
    low, high = _interval(sympy.expand(a - b), values)
    facts = {
        ast.GtE: low_a >= high_b or low >= 0,
        ast.Gt: low_a > high_b or low > 0,
        ast.LtE: high_a <= low_b or high <= 0,
        ast.Lt: high_a < low_b or high < 0,
        ast.NotEq: low_a > high_b or high_a < low_b or low > 0 or high < 0,
        ast.Eq: low == high == 0,
    }
    return bool(facts.get(type(op)))


def _interval(expression: Any, values: Values) -> tuple[Any, Any]:
    from torch.utils._sympy.numbers import int_oo
    from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

    if expression.is_Integer:
        return expression, expression
    ranges = {}
    for symbol in expression.free_symbols:
        bounds = values[symbol.name]
        low = align(bounds.minimum, bounds.multiple_of)
        high = int_oo if bounds.maximum is None else max(0, (bounds.maximum - low) // bounds.multiple_of)
        ranges[symbol] = ValueRanges(0, high)
    found = bound_sympy(expression, ranges)
    return found.lower, found.upper
