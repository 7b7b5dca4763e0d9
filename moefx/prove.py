"""Proofs about predicates: the little language, truth on values, counterexamples in ranges, and sound algebra by sympy.

Nothing here guesses: `proved` is True only when shown for every value in range; what needs more stays open.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any


@dataclass(frozen=True)
class Range:
    """An integer dim known by bounds: minimum <= n (<= maximum) and n % multiple_of == 0."""

    minimum: int = 0
    maximum: int | None = None
    multiple_of: int = 1

    def __post_init__(self) -> None:
        if self.multiple_of < 1:
            raise ValueError(f"a range in steps of {self.multiple_of} has no sizes; multiple_of must be at least 1")


@dataclass(frozen=True)
class Derived:
    """A dim that is an expression of other facts, like `align(T, 128)`: a size that moefx itself picks."""

    text: str

    def __post_init__(self) -> None:
        tree = _checked_nodes(self.text)
        if _is_condition(tree):
            raise ValueError(f"predicate {self.text!r}: a size was expected, not a condition")
        _check_kinds(tree, self.text)


Values = Mapping[str, Any]
_NODES = (
    *(ast.BoolOp, ast.And, ast.Or, ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn, ast.Not),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.UnaryOp, ast.USub, ast.Call),
    *(ast.Name, ast.Load, ast.Constant, ast.Tuple),
)


def align(n: int, multiple: int) -> int:
    """n rounded up to a multiple."""
    return -(-n // multiple) * multiple


FUNCTIONS = {"min": min, "max": max, "align": align}


def check(text: str, names: tuple[str, ...]) -> None:
    """ValueError, with the text in it, for what is not a predicate over `names`."""
    tree = _checked_nodes(text)
    if not _is_condition(tree):
        raise ValueError(f"predicate {text!r}: a condition was expected, like `{text} > 0`")
    _check_kinds(tree, text)
    unknown = sorted(free_names(tree) - set(names))
    if unknown:
        raise ValueError(f"predicate {text!r}: {', '.join(unknown)} is no dim and no fact; known are {', '.join(names)}")


def _is_condition(tree: ast.AST) -> bool:
    return isinstance(tree, (ast.BoolOp, ast.Compare)) or isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.Not)


def _check_kinds(tree: ast.expr, text: str) -> None:
    """Conditions joined by and, or, not; sizes everywhere else: a condition is never a number."""
    for node in ast.walk(tree):
        joins = isinstance(node, ast.BoolOp) or isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
        children = [c for c in ast.iter_child_nodes(node) if isinstance(c, ast.expr)]
        if joins and not all(_is_condition(c) for c in children):
            raise ValueError(f"predicate {text!r}: and, or, not join conditions, not sizes")
        if not joins and any(_is_condition(c) for c in children):
            raise ValueError(f"predicate {text!r}: a condition stands where a size was expected")


def _is_function(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id in FUNCTIONS and not call.keywords and len(call.args) == 2


def _checked_nodes(text: str) -> ast.expr:
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"predicate {text!r} does not parse: {error.msg}") from error
    compares = [node for node in ast.walk(tree) if isinstance(node, ast.Compare)]
    members = [c for node in compares for op, c in zip(node.ops, node.comparators, strict=True) if isinstance(op, (ast.In, ast.NotIn))]
    for node in ast.walk(tree):
        if isinstance(node, ast.Tuple) and node not in members:
            raise ValueError(f"predicate {text!r}: a tuple stands only behind `in`")
        if isinstance(node, ast.Constant) and not isinstance(node.value, (int, str, type(None))):
            raise ValueError(f"predicate {text!r}: {node.value!r} is no integer, text, bool or None")
        if not isinstance(node, _NODES):
            raise ValueError(f"predicate {text!r}: {type(node).__name__} is not part of the predicate language")
        if isinstance(node, ast.Call) and not _is_function(node):
            raise ValueError(f"predicate {text!r}: only {', '.join(FUNCTIONS)} of two values may be called")
    return tree


@cache
def parse(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def names_in(text: str) -> list[str]:
    """The facts a text names, in reading order."""
    return sorted(free_names(parse(text)), key=text.index)


def free_names(tree: ast.expr) -> set[str]:
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} - FUNCTIONS.keys()


class _Substitute(ast.NodeTransformer):
    def __init__(self, trees: Mapping[str, ast.expr]) -> None:
        self.trees = trees

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.trees.get(node.id, node)


def expand(tree: ast.expr, facts: Values) -> ast.expr:
    """The tree with every `Derived` fact written out. ValueError where one is made of itself."""
    depth = 0
    while derived := {n: parse(facts[n].text) for n in free_names(tree) if isinstance(facts.get(n), Derived)}:
        tree = _Substitute(derived).visit(ast.parse(ast.unparse(tree), mode="eval").body)
        depth += 1
        if depth > len(facts):
            raise ValueError(f"the facts {', '.join(sorted(derived))} are derived from each other")
    return ast.parse(ast.unparse(tree), mode="eval").body


def substituted(tree: ast.expr, values: Values) -> ast.expr:
    """The tree with constants in the place of names."""
    return _Substitute({n: ast.Constant(v) for n, v in values.items()}).visit(ast.parse(ast.unparse(tree), mode="eval").body)


def value_at(fact: Any, facts: Values, at: Values) -> Any:
    """A derived fact at one assignment; None where it is not defined."""
    try:
        return _evaluate(expand(parse(fact.text), facts), at)
    except ZeroDivisionError:
        return None


def shown(value: Any) -> Any:
    """A fact as a report shows it: plain JSON."""
    if isinstance(value, Derived):
        return value.text
    if is_symbolic(value):
        return str(value)
    if not isinstance(value, Range):
        return value
    upper = f"{value.maximum}" if value.maximum is not None else "any"
    return f"{value.minimum}..{upper}" + (f" in steps of {value.multiple_of}" if value.multiple_of > 1 else "")


def truth(tree: ast.expr | CodeType, values: Values) -> bool:
    """The predicate on concrete values; a division by zero, or a comparison of what has no order, is no truth."""
    try:
        return bool(_evaluate(tree, values))
    except (ZeroDivisionError, TypeError):
        return False


def compiled(tree: ast.expr) -> CodeType:
    """The tree as code, for many evaluations. The text was checked to be a small expression."""
    return compile(ast.Expression(ast.fix_missing_locations(tree)), "<predicate>", "eval")


def _evaluate(tree: ast.expr | CodeType, values: Values) -> Any:
    code = compiled(tree) if isinstance(tree, ast.expr) else tree
    return eval(code, {"__builtins__": {}, **FUNCTIONS}, dict(values))  # noqa: S307


def sides(tree: ast.expr, values: Values) -> tuple[int | None, int | None]:
    """Both sides of a single comparison of integers."""
    if not isinstance(tree, ast.Compare) or len(tree.ops) != 1 or isinstance(tree.ops[0], (ast.In, ast.NotIn)):
        return None, None
    try:
        left, right = _evaluate(tree.left, values), _evaluate(tree.comparators[0], values)
    except (ZeroDivisionError, TypeError):
        return None, None
    return (left, right) if all(isinstance(s, int) and not isinstance(s, bool) for s in (left, right)) else (None, None)


def counterexample(tree: ast.expr, values: Values, ranged: Mapping[str, Range]) -> dict[str, int] | None:
    """Sizes in range that make the predicate false: of one dim the smallest of its first 4,096 values, of several the smallest sampled."""
    for sample in _samples(ranged):
        if not truth(tree, {**values, **sample}):
            return _smallest(tree, values, ranged) or sample
    return None


def witness(tree: ast.expr, values: Values, ranged: Mapping[str, Range]) -> dict[str, int] | None:
    """Sizes in range, beyond zero, for which the predicate is true."""
    return next((s for s in _samples(ranged) if any(s.values()) and truth(tree, {**values, **s})), None)


def _samples(ranged: Mapping[str, Range]) -> Iterator[dict[str, int]]:
    """Boundary and small values of every ranged dim, smallest first."""
    choices = []
    for name, bounds in ranged.items():
        step = bounds.multiple_of
        low = align(bounds.minimum, step)
        points = {low + i * step for i in range(9)} | {low + i * step for i in (63, 127, 255, 4095)}
        if bounds.maximum is not None:
            high = bounds.maximum // step * step
            points = {p for p in points | {high, high - step} if low <= p <= high}
        choices.append([(name, p) for p in sorted(points)])
    for combination in sorted(itertools.islice(itertools.product(*choices), 20000), key=lambda c: sum(v for _, v in c)):
        yield dict(combination)


def _smallest(tree: ast.expr, values: Values, ranged: Mapping[str, Range]) -> dict[str, int] | None:
    if len(ranged) != 1:
        return None
    ((name, bounds),) = ranged.items()
    step = bounds.multiple_of
    low = align(bounds.minimum, step)
    last = low + 4095 * step if bounds.maximum is None else min(bounds.maximum, low + 4095 * step)
    return next(({name: n} for n in range(low, last + 1, step) if not truth(tree, {**values, name: n})), None)


def is_symbolic(value: Any) -> bool:
    """Whether a fact is a size of a traced graph (torch.SymInt)."""
    return type(value).__name__ == "SymInt" and hasattr(value, "node")


def with_symbols(tree: ast.expr, values: Values) -> str:
    """The status by what torch's ShapeEnv knows already; no guard is added."""
    if any(isinstance(v, Range) for v in values.values()) or not _divides(tree, values):
        return "unknown"
    if _known(tree, values, True):
        return "proved"
    return "refuted" if _known(tree, values, False) else "unknown"


def _divides(tree: ast.expr, values: Values) -> bool:
    """Whether every divisor is statically known not to be zero."""
    divisors = [n.right for n in ast.walk(tree) if isinstance(n, ast.BinOp) and isinstance(n.op, (ast.FloorDiv, ast.Mod))]
    return all(_known(ast.Compare(d, [ast.NotEq()], [ast.Constant(0)]), values, True) for d in divisors)


def _known(tree: ast.expr, values: Values, wanted: bool) -> bool:
    """Whether the tree is statically known to be `wanted`."""
    from torch import sym_not
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    if isinstance(tree, ast.BoolOp):
        every = isinstance(tree.op, ast.And) == wanted
        return (all if every else any)(_known(v, values, wanted) for v in tree.values)
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.Not):
        return _known(tree.operand, values, not wanted)
    if not isinstance(tree, ast.Compare) or any(isinstance(op, (ast.In, ast.NotIn)) for op in tree.ops):
        return not any(is_symbolic(values[n]) for n in free_names(tree)) and truth(tree, values) == wanted
    ends = [tree.left, *tree.comparators]
    pairs = [ast.Compare(a, [op], [b]) for a, op, b in zip(ends, tree.ops, ends[1:], strict=False)]
    try:
        found = [_symbolic(p, values) for p in pairs]
    except (ZeroDivisionError, TypeError):
        return False
    return (all if wanted else any)(statically_known_true(f if wanted else sym_not(f)) for f in found)


def _symbolic(tree: ast.expr, values: Values) -> Any:
    from torch import sym_max, sym_min

    code = compile(ast.Expression(ast.fix_missing_locations(tree)), "<predicate>", "eval")
    return eval(code, {"__builtins__": {}, "min": sym_min, "max": sym_max, "align": align}, dict(values))  # noqa: S307


def proved(tree: ast.expr, values: Values) -> bool:
    """Whether the predicate holds, and is defined, for every value in range."""
    from moefx.algebra import defined, holds_everywhere

    return defined(tree, values) and holds_everywhere(tree, values)
