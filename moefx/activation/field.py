"""Canonical element-wise expressions: rational functions over interned atoms, so that equality is `==`.

An expression is an element of a sympy fraction field over the rationals. Its generators are atoms: a leaf column of an expert product, or
a function of another expression (sigmoid(P), relu(P - t), erf(P), ...). What makes spellings meet:

- exp(x) = s / (1 - s) and tanh(x) = 2 sigmoid(2x) - 1 with s = sigmoid(x), sigmoid(-x) = 1 - sigmoid(x);
- min, max, clamp, abs, where of one base P become c0 + c1 P + sum r_t relu(P - t), a unique basis of piecewise-linear functions;
- constants are the exact rationals of the doubles in the graph.

Only gelu's irrational constants are matched with a tolerance (6e-8).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from sympy import QQ
from sympy.polys.fields import field

_POOL = 40
_FIELD, *_GENS = field([f"a{i}" for i in range(_POOL)], QQ)
_GELU_TOLERANCE = 6e-8

Expr = Any  # an element of _FIELD


class TooManyAtomsError(Exception):
    """An expression with more atoms than any activation has."""


@dataclass(frozen=True)
class Atom:
    """kind "leaf" (key: what the caller named it) or a function name (key: its canonical argument and parameters)."""

    kind: str
    key: Any


class Algebra:
    """One table of interned atoms and the operations on expressions over them."""

    def __init__(self) -> None:
        self.atoms: list[Atom] = []
        self._index: dict[Atom, Expr] = {}

    def atom(self, kind: str, key: Any) -> Expr:
        wanted = Atom(kind, key)
        if wanted not in self._index:
            if len(self.atoms) == _POOL:
                raise TooManyAtomsError
            self._index[wanted] = _GENS[len(self.atoms)]
            self.atoms.append(wanted)
        return self._index[wanted]

    def constant(self, number: float | int) -> Expr:
        if isinstance(number, float) and not math.isfinite(number):
            raise ValueError(f"the constant {number} is not finite")
        exact = Fraction(number)
        return _ground(QQ(exact.numerator, exact.denominator))

    def atoms_of(self, expr: Expr) -> set[Atom]:
        """Atoms that occur in `expr`, those inside function atoms included."""
        found: set[Atom] = set()
        todo = [expr]
        while todo:
            for atom in self._direct(todo.pop()):
                if atom not in found:
                    found.add(atom)
                    if atom.kind != "leaf":
                        todo.append(atom.key[0])
        return found

    def _direct(self, expr: Expr) -> list[Atom]:
        used: set[int] = set()
        for poly in (expr.numer, expr.denom):
            for monomial in poly.itermonoms():
                used.update(i for i, power in enumerate(monomial) if power)
        return [self.atoms[i] for i in sorted(used)]

    def divide(self, a: Expr, b: Expr) -> Expr:
        """a / b where b is a constant or a product of sigmoids, which are never zero; else an opaque atom: u / u is not 1 at 0."""
        if b == 0:
            raise ValueError("a division by zero")
        if all(self._never_zero(poly) for poly in (b.numer, b.denom)):
            return a / b
        return a * self.atom("reciprocal", (b,))

    def _never_zero(self, poly: Any) -> bool:
        """A constant, a monomial of sigmoids, or c * (1 - sigmoid)."""
        terms = list(poly.terms())
        if len(terms) == 1:
            return all(not power or self.atoms[i].kind.startswith("sigmoid") for i, power in enumerate(terms[0][0]))
        if len(terms) == 2:
            (m1, c1), (m2, c2) = terms
            return c1 == -c2 and not any(m2) and sum(m1) == 1 and self.atoms[m1.index(1)].kind.startswith("sigmoid")
        return False

    def sigmoid(self, x: Expr) -> Expr:
        if self.is_constant(x):
            return self.function("sigmoid_constant", x)
        if _leading(x) < 0:
            return 1 - self.sigmoid(-x)
        cubic = self._gelu_argument(x)
        return self.atom("sigmoid_gelu", (cubic,)) if cubic is not None else self.atom("sigmoid", (x,))

    def _gelu_argument(self, x: Expr) -> Expr | None:
        """P when x = 2 sqrt(2/pi) (P + 0.044715 P^3) up to rounding of the constants."""
        poly = _polynomial(x)
        if poly is None or len(poly.terms()) != 2:
            return None
        terms = sorted(poly.terms(), key=lambda t: sum(t[0]))
        (m1, c1), (m3, c3) = terms
        if tuple(3 * i for i in m1) != m3:
            return None
        scale = 2 * math.sqrt(2 / math.pi)
        close = abs(float(c1) / scale - 1) < _GELU_TOLERANCE and abs(float(c3) / (scale * 0.044715) - 1) < 2 * _GELU_TOLERANCE
        return _monomial(m1) if close else None

    def exp(self, x: Expr) -> Expr:
        s = self.sigmoid(x)
        return s / (1 - s)

    def tanh(self, x: Expr) -> Expr:
        return 2 * self.sigmoid(2 * x) - 1

    def erf(self, x: Expr) -> Expr:
        if _leading(x) < 0:
            return -self.erf(-x)
        factor = _leading(x)
        if abs(float(factor) / math.sqrt(0.5) - 1) < _GELU_TOLERANCE:
            return self.atom("erf_gelu", (x / factor,))
        return self.atom("erf", (x,))

    def gelu(self, x: Expr, approximate: str) -> Expr:
        if approximate == "tanh":
            return x * self._positive("sigmoid_gelu", x)
        half = self.constant(0.5)
        sign = -1 if _leading(x) < 0 else 1
        return half * x * (1 + sign * self.atom("erf_gelu", (sign * x,)))

    def _positive(self, kind: str, x: Expr) -> Expr:
        return 1 - self.atom(kind, (-x,)) if _leading(x) < 0 else self.atom(kind, (x,))

    def function(self, name: str, *arguments: Any) -> Expr:
        """A function moefx knows nothing of: equal only to itself."""
        return self.atom(name, arguments)

    def is_constant(self, x: Expr) -> bool:
        return not self._direct(x)

    def to_fraction(self, x: Expr) -> Fraction:
        return _fraction(x.numer.coeff(1) / x.denom.coeff(1)) if x != 0 else Fraction(0)

    def minimum(self, a: Expr, b: Expr) -> Expr:
        """Propagates NaN, as aten.minimum and clamp do."""
        return b + self.piecewise(a - b, lambda f: f.capped(Fraction(0), upper=True))

    def maximum(self, a: Expr, b: Expr) -> Expr:
        return b + self.piecewise(a - b, lambda f: f.capped(Fraction(0), upper=False))

    def absolute(self, a: Expr) -> Expr:
        return self.maximum(a, -a)

    def where(self, greater: bool, left: Expr, right: Expr, a: Expr, b: Expr) -> Expr | None:
        """where(left > right, a, b) (or <): the continuous piecewise-linear function it is, else None.

        A NaN takes the branch b, so b must depend on the base: else the NaN would be dropped.
        """
        condition = left - right if greater else right - left
        base, split = self._affine_base(condition)
        if base is None or self.is_constant(b):
            return None
        f_condition, f_a, f_b = (self._as_piecewise(e, base) for e in (condition, a, b))
        if f_condition is None or f_a is None or f_b is None or f_condition.knots:
            return None
        threshold = -f_condition.offset / f_condition.slope
        joined = f_a.after(f_b, threshold) if f_condition.slope > 0 else f_b.after(f_a, threshold)
        return None if joined is None else self._rebuild(joined, base)

    def piecewise(self, x: Expr, change: Callable[[Piecewise], Piecewise]) -> Expr:
        """`change` applied to x as a piecewise-linear function of its base."""
        if self.is_constant(x):
            return self.constant_fraction(change(Piecewise(self.to_fraction(x), Fraction(0), ())).offset)
        base, _ = self._affine_base(x)
        found = self._as_piecewise(x, base) if base is not None else None
        if found is None or base is None:
            base, found = x, Piecewise(Fraction(0), Fraction(1), ())
        return self._rebuild(change(found), base)

    def constant_fraction(self, value: Fraction) -> Expr:
        return _ground(QQ(value.numerator, value.denominator))

    def _affine_base(self, x: Expr) -> tuple[Expr | None, None]:
        """P such that x is an affine or piecewise-linear function of P: no constant term, leading coefficient 1."""
        bases = {atom.key[0] for atom in self._direct(x) if atom.kind == "relu"}
        if len(bases) == 1:
            return next(iter(bases)), None
        if bases or _polynomial(x) is None:
            return None, None
        rest = x - self._constant_term(x)
        return (rest / _ground(_leading(rest)), None) if rest != 0 else (None, None)

    def _constant_term(self, x: Expr) -> Expr:
        return _ground(x.numer.coeff(1) / x.denom.LC) if x != 0 else x

    def _as_piecewise(self, x: Expr, base: Expr) -> Piecewise | None:
        poly = _polynomial(x)
        if poly is None:
            return None
        knots = []
        rest = x
        for atom in self._direct(x):
            if atom.kind == "relu" and atom.key[0] == base:
                gen = self._index[atom]
                weight = poly.coeff(gen.numer)
                if weight:
                    knots.append((atom.key[1], _fraction(weight)))
                    rest = rest - _ground(weight) * gen
        offset = self._constant_term(rest)
        rest = rest - offset
        slope = Fraction(0)
        if rest != 0:
            ratio = rest / base
            if not self.is_constant(ratio):
                return None
            slope = self.to_fraction(ratio)
        return Piecewise(self.to_fraction(offset), slope, tuple(sorted(knots)))

    def _rebuild(self, f: Piecewise, base: Expr) -> Expr:
        total = self.constant_fraction(f.offset) + self.constant_fraction(f.slope) * base
        for knot, weight in f.knots:
            total = total + self.constant_fraction(weight) * self.atom("relu", (base, knot))
        return total


@dataclass(frozen=True)
class Piecewise:
    """offset + slope * p + sum weight * relu(p - knot), knots ascending, weights nonzero."""

    offset: Fraction
    slope: Fraction
    knots: tuple[tuple[Fraction, Fraction], ...]

    def __call__(self, p: Fraction) -> Fraction:
        return self.offset + self.slope * p + sum((w * (p - k) for k, w in self.knots if p > k), Fraction(0))

    def pieces(self) -> list[tuple[Fraction | None, Fraction, Fraction]]:
        """(start, value offset, slope) of every linear piece; start None is minus infinity."""
        result: list[tuple[Fraction | None, Fraction, Fraction]] = [(None, self.offset, self.slope)]
        for knot, weight in self.knots:
            _, offset, slope = result[-1]
            result.append((knot, offset - weight * knot, slope + weight))
        return result

    @staticmethod
    def of_pieces(pieces: list[tuple[Fraction | None, Fraction, Fraction]]) -> Piecewise:
        _, offset, slope = pieces[0]
        knots = []
        for (_, _, before), (start, _, after) in zip(pieces, pieces[1:], strict=False):
            if before != after and start is not None:
                knots.append((start, after - before))
        return Piecewise(offset, slope, tuple(knots))

    def capped(self, bound: Fraction, upper: bool) -> Piecewise:
        """min(f, bound) (upper) or max(f, bound)."""
        result: list[tuple[Fraction | None, Fraction, Fraction]] = []
        pieces = self.pieces()
        for i, (start, offset, slope) in enumerate(pieces):
            end = pieces[i + 1][0] if i + 1 < len(pieces) else None
            cross = (bound - offset) / slope if slope else None
            cuts = [start]
            if cross is not None and (start is None or cross > start) and (end is None or cross < end):
                cuts.append(cross)
            for j, cut in enumerate(cuts):
                stop = cuts[j + 1] if j + 1 < len(cuts) else end
                middle = _between(cut, stop)
                over = offset + slope * middle > bound
                result.append((cut, bound, Fraction(0)) if over == upper and offset + slope * middle != bound else (cut, offset, slope))
        return Piecewise.of_pieces(result)

    def after(self, before: Piecewise, threshold: Fraction) -> Piecewise | None:
        """`before` up to the threshold and self past it; None when they do not meet there."""
        if self(threshold) != before(threshold):
            return None
        left = [piece for piece in before.pieces() if piece[0] is None or piece[0] < threshold]
        right = [piece for piece in self.pieces()]
        start = max((i for i, piece in enumerate(right) if piece[0] is None or piece[0] <= threshold), default=0)
        joined = [*left, (threshold, right[start][1], right[start][2]), *right[start + 1 :]]
        return Piecewise.of_pieces(joined)


def _between(start: Fraction | None, end: Fraction | None) -> Fraction:
    if start is None:
        return Fraction(0) if end is None else end - 1
    return start + 1 if end is None else (start + end) / 2


def _polynomial(x: Expr) -> Any:
    """x as a polynomial over the rationals; None when it has a denominator."""
    return x.numer.mul_ground(1 / x.denom.LC) if x.denom.is_ground else None


def _leading(x: Expr) -> Any:
    """The leading coefficient: its sign makes P and -P one atom."""
    return x.numer.LC / x.denom.LC if x != 0 else QQ(0)


def _ground(value: Any) -> Expr:
    return _FIELD.ground_new(value)


def _fraction(value: Any) -> Fraction:
    return Fraction(int(value.numerator), int(value.denominator))


def _monomial(powers: tuple[int, ...]) -> Expr:
    result = _FIELD.one
    for gen, power in zip(_GENS, powers, strict=True):
        if power:
            result = result * gen**power
    return result
