"""Contracts: what a kernel needs, as sympy predicates over named dims, and what is known of them.

A predicate is written as it is read, `Predicate("D // 8 >= E")`, over the dims T, N, K, H, D, E, E_total, G, S, ep_size and the categorical
facts dtype, weight_format, activation, clamp, columns, bias, target, precision, isa. Evaluated on facts it has one of four outcomes:

- proved: true for every size in the declared ranges;
- refuted: false for sizes in range; the counterexample is the smallest found;
- guarded: decided at run time by a guard moefx inserted;
- unknown: neither could be shown; `needs` says what would decide it.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DIMS = ("T", "N", "K", "H", "D", "E", "E_total", "G", "S", "ep_size")
CATEGORIES = (
    "dtype",
    "weight_format",
    "activation",
    "clamp",
    "columns",
    "bias",
    "target",
    "precision",
    "shared_activation",
    "same_weight_format",
    "isa",
)


@dataclass(frozen=True)
class Range:
    """An integer dim known by bounds: minimum <= n (<= maximum) and n % multiple_of == 0."""

    minimum: int = 0
    maximum: int | None = None
    multiple_of: int = 1


Fact = int | Range | str | bool | None
Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Predicate:
    """One condition; `why` is the property of the kernel behind it."""

    text: str
    why: str = ""

    def __post_init__(self) -> None:
        try:
            tree = ast.parse(self.text, mode="eval").body
        except SyntaxError as error:
            raise ValueError(f"predicate {self.text!r} does not parse: {error.msg}") from error
        _check(tree, self.text)


@dataclass(frozen=True)
class PredicateOutcome:
    text: str
    values: dict[str, Any]
    lhs: int | None
    rhs: int | None
    status: str
    needs: str = ""
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        found = {"text": self.text, "values": self.values, "lhs": self.lhs, "rhs": self.rhs, "status": self.status}
        return {**found, "needs": self.needs} if self.needs else found


@dataclass(frozen=True)
class Outcome:
    """A contract on facts: refuted when one predicate is, unknown when one is, else proved."""

    kernel: str
    status: str
    predicates: tuple[PredicateOutcome, ...]
    value_checks: tuple[str, ...] = ()

    def first_failure(self) -> PredicateOutcome | None:
        return next((p for p in self.predicates if p.status in ("refuted", "unknown")), None)

    def to_json(self) -> dict[str, Any]:
        return {
            "kernel": self.kernel,
            "status": self.status,
            "predicates": [p.to_json() for p in self.predicates],
            "value_checks": list(self.value_checks),
        }


@dataclass(frozen=True)
class Contract:
    """What `kernel` needs. `precisions` and `targets`: the requests it is a candidate for; `value_checks`: conditions on values, apart."""

    kernel: str
    predicates: tuple[Predicate, ...]
    value_checks: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ("preserve",)
    targets: tuple[str, ...] = field(default=("cpu",))

    def evaluate(self, facts: Facts, suffix: str = "") -> Outcome:
        outcomes = tuple(evaluate(p, facts) for p in self.predicates)
        states = {o.status for o in outcomes}
        status = next((s for s in ("refuted", "unknown", "guarded") if s in states), "proved")
        return Outcome(self.kernel + suffix, status, outcomes, self.value_checks)


def evaluate(predicate: Predicate, facts: Facts) -> PredicateOutcome:
    """The outcome of one predicate on facts: ints, `Range`s and categorical values by name."""
    tree = ast.parse(predicate.text, mode="eval").body
    names = sorted({n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}, key=predicate.text.index)
    values = {n: facts.get(n) for n in names}
    missing = [n for n in names if n not in facts]
    shown = {n: _shown(v) for n, v in values.items() if n in facts}
    if missing:
        return PredicateOutcome(predicate.text, shown, None, None, "unknown", f"the value of {', '.join(missing)}", predicate.why)
    ranged = {n: v for n, v in values.items() if isinstance(v, Range)}
    if not ranged:
        lhs, rhs = _sides(tree, values)
        return PredicateOutcome(predicate.text, shown, lhs, rhs, "proved" if _truth(tree, values) else "refuted", why=predicate.why)
    for sample in _samples(ranged):
        at = {**values, **sample}
        if not _truth(tree, at):
            sample = _smallest(tree, values, ranged) or sample
            lhs, rhs = _sides(tree, {**values, **sample})
            return PredicateOutcome(predicate.text, {**shown, **sample}, lhs, rhs, "refuted", why=predicate.why)
    if _defined(tree, values) and _proved(tree, values):
        return PredicateOutcome(predicate.text, shown, None, None, "proved", why=predicate.why)
    return PredicateOutcome(predicate.text, shown, None, None, "unknown", f"narrower bounds of {', '.join(ranged)}", predicate.why)


def _shown(value: Any) -> Any:
    if not isinstance(value, Range):
        return value
    upper = f"{value.maximum}" if value.maximum is not None else "any"
    return f"{value.minimum}..{upper}" + (f" in steps of {value.multiple_of}" if value.multiple_of > 1 else "")


_NODES = (
    ast.BoolOp,
    ast.And,
    ast.Or,
    ast.Compare,
    ast.BinOp,
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.FloorDiv,
    ast.Mod,
    ast.UnaryOp,
    ast.USub,
    ast.Not,
    ast.Name,
    ast.Load,
    ast.Constant,
    ast.Tuple,
    ast.Eq,
    ast.NotEq,
    ast.Lt,
    ast.LtE,
    ast.Gt,
    ast.GtE,
    ast.In,
    ast.NotIn,
)


def _check(tree: ast.expr, text: str) -> None:
    compares = [node for node in ast.walk(tree) if isinstance(node, ast.Compare)]
    members = [c for node in compares for op, c in zip(node.ops, node.comparators, strict=True) if isinstance(op, (ast.In, ast.NotIn))]
    for node in ast.walk(tree):
        if isinstance(node, ast.Tuple) and node not in members:
            raise ValueError(f"predicate {text!r}: a tuple stands only behind `in`")
        if isinstance(node, ast.Constant) and not isinstance(node.value, (int, str, type(None))):
            raise ValueError(f"predicate {text!r}: {node.value!r} is no integer, text, bool or None")
        if not isinstance(node, _NODES):
            raise ValueError(f"predicate {text!r}: {type(node).__name__} is not part of the predicate language")
        if isinstance(node, ast.Name) and node.id not in DIMS + CATEGORIES:
            raise ValueError(f"predicate {text!r}: {node.id} is no dim ({', '.join(DIMS)}) and no fact ({', '.join(CATEGORIES)})")


def _truth(tree: ast.expr, values: Mapping[str, Any]) -> bool:
    """The predicate on concrete values; a division by zero is no truth. The text was checked to be a small expression."""
    try:
        return bool(eval(compile(ast.Expression(tree), "<predicate>", "eval"), {"__builtins__": {}}, dict(values)))  # noqa: S307
    except ZeroDivisionError:
        return False


def _sides(tree: ast.expr, values: Mapping[str, Any]) -> tuple[int | None, int | None]:
    if not isinstance(tree, ast.Compare) or len(tree.ops) != 1 or isinstance(tree.ops[0], (ast.In, ast.NotIn)):
        return None, None
    try:
        sides = [
            eval(compile(ast.Expression(e), "<predicate>", "eval"), {"__builtins__": {}}, dict(values))  # noqa: S307
            for e in (tree.left, tree.comparators[0])
        ]
    except ZeroDivisionError:
        return None, None
    return (sides[0], sides[1]) if all(isinstance(s, int) and not isinstance(s, bool) for s in sides) else (None, None)


def _samples(ranged: Mapping[str, Range]) -> Any:
    """Boundary and small values of every ranged dim, smallest first."""
    choices = []
    for name, bounds in ranged.items():
        step = bounds.multiple_of
        low = -(-bounds.minimum // step) * step
        points = {low + i * step for i in range(9)} | {low + i * step for i in (63, 127, 255, 4095)}
        if bounds.maximum is not None:
            high = bounds.maximum // step * step
            points = {p for p in points | {high, high - step} if low <= p <= high}
        choices.append([(name, p) for p in sorted(points)])
    for combination in sorted(itertools.islice(itertools.product(*choices), 20000), key=lambda c: sum(v for _, v in c)):
        yield dict(combination)


def _smallest(tree: ast.expr, values: Mapping[str, Any], ranged: Mapping[str, Range]) -> dict[str, int] | None:
    """The smallest counterexample among the first 4096 values of a lone ranged dim."""
    if len(ranged) != 1:
        return None
    ((name, bounds),) = ranged.items()
    step = bounds.multiple_of
    low = -(-bounds.minimum // step) * step
    last = low + 4095 * step if bounds.maximum is None else min(bounds.maximum, low + 4095 * step)
    return next(({name: n} for n in range(low, last + 1, step) if not _truth(tree, {**values, name: n})), None)


class _NotShownError(Exception):
    """The expression is beyond what the algebra decides soundly."""


def _defined(tree: ast.expr, values: Mapping[str, Any]) -> bool:
    """Whether no divisor is zero anywhere in range; a proof of one part says nothing where another part divides by zero."""
    divisors = [n.right for n in ast.walk(tree) if isinstance(n, ast.BinOp) and isinstance(n.op, (ast.FloorDiv, ast.Mod))]
    try:
        return all(_to_sympy(d, values).is_nonzero for d in divisors)
    except _NotShownError:
        return False


def _proved(tree: ast.expr, values: Mapping[str, Any]) -> bool:
    """Whether the predicate holds for every value in range, by sympy and interval arithmetic; False when not shown."""
    if isinstance(tree, ast.BoolOp):
        return (all if isinstance(tree.op, ast.And) else any)(_proved(v, values) for v in tree.values)
    if not isinstance(tree, ast.Compare):
        return False
    names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    if not any(isinstance(values[n], Range) for n in names):
        return _truth(tree, values)
    left = tree.left
    for op, right in zip(tree.ops, tree.comparators, strict=True):
        try:
            if not _holds(op, _to_sympy(left, values), _to_sympy(right, values)):
                return False
        except _NotShownError:
            return False
        left = right
    return True


def _to_sympy(tree: ast.expr, values: Mapping[str, Any]) -> Any:
    """A dim in steps of m is m times a nonnegative integer; // and % are torch's FloorDiv and Mod."""
    import sympy
    from torch.utils._sympy.functions import FloorDiv, Mod

    if isinstance(tree, (ast.Constant, ast.Name)):
        value = tree.value if isinstance(tree, ast.Constant) else values[tree.id]
        if isinstance(value, int):
            return sympy.Integer(value)
        if not isinstance(tree, ast.Name) or not isinstance(value, Range):
            raise _NotShownError
        step = value.multiple_of
        low = -(-value.minimum // step)
        return step * (low + sympy.Symbol(tree.id, integer=True, nonnegative=True))
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        return -_to_sympy(tree.operand, values)
    if not isinstance(tree, ast.BinOp):
        raise _NotShownError
    a, b = sympy.expand(_to_sympy(tree.left, values)), sympy.expand(_to_sympy(tree.right, values))
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


def _holds(op: ast.cmpop, a: Any, b: Any) -> bool:
    """Sound: True only when shown. Upper bounds of ranges are not used; what needs them stays unknown."""
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
