"""Name the activation between two expert GEMMs, by algebra: read the region as an expression, propose a variant, accept exact equality."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import fx

from moefx.activation.field import Algebra, Expr, TooManyAtomsError
from moefx.activation.probe import extremes_differ
from moefx.activation.pull import Pull, UnreadableError, region_nodes
from moefx.activation.spec import Activation
from moefx.graph import features, last_dim, value


@dataclass(frozen=True)
class Recognised:
    """`leaves`: the gate_up leaf, or (gate leaf, up leaf) when they are two nodes."""

    activation: Activation
    leaves: tuple[fx.Node, ...]
    rounding: str


@dataclass(frozen=True)
class Refused:
    """Why the region is no named variant, and the node in the way where there is one."""

    reason: str
    node: fx.Node | None = None


def recognise(output: fx.Node, leaves: Sequence[fx.Node]) -> Recognised | Refused:
    """The named activation that `output` [.., D] is of the `leaves` ([.., 2D] or [.., D] each; one more dim of size 1 may follow).

    Exact in its constants (they are the doubles of the graph); gelu's alone have a tolerance of 6e-8.
    """
    algebra = Algebra()
    pull = Pull(algebra, {leaf: last_dim(leaf) for leaf in leaves})
    width = features(output)
    try:
        expr = pull.read(output, torch.arange(width))
        hits = [hit for hit in _proposals(algebra, expr, width) if hit is not None]
    except UnreadableError as error:
        return Refused(str(error), error.node)
    except TooManyAtomsError:
        return Refused("the activation has more terms than any named variant", output)
    except ValueError as error:
        return Refused(f"the activation could not be read: {error}", output)
    if not hits:
        return Refused("the activation fits no named variant", output)
    activation, order = hits[0]
    differs = extremes_differ(activation, output, order)
    if differs is not None:
        return Refused(differs, output)
    return Recognised(activation, order, _rounding(output, leaves))


def _rounding(output: fx.Node, leaves: Sequence[fx.Node]) -> str:
    types = {
        str(value(n).dtype).removeprefix("torch.")
        for n in region_nodes(output, leaves)
        if isinstance(value(n), torch.Tensor) and value(n).is_floating_point()
    }
    narrow = sorted(types & {"bfloat16", "float16"})
    return f"equal up to rounding: the model rounds to {narrow[0]} between steps" if narrow else "exact"


def _proposals(a: Algebra, expr: Expr, width: int) -> Iterator[tuple[Activation, tuple[fx.Node, ...]] | None]:
    columns = [atom for atom in a.atoms_of(expr) if atom.kind == "leaf"]
    if len(columns) == 1:
        x = a.atom("leaf", columns[0].key)
        if columns[0].key[1] == tuple(range(width)):
            for kind, formula in (("relu2", a.maximum(x, a.constant(0)) ** 2), ("silu", x * a.sigmoid(x))):
                if expr == formula:
                    yield Activation(kind), (columns[0].key[0],)
        return
    if len(columns) != 2:
        return
    for gate, up in (columns, columns[::-1]):
        order = _column_order(gate.key, up.key, width)
        for kind, limit, clamp, alpha, beta in _variants(a, expr, a.atom("leaf", gate.key), a.atom("leaf", up.key)):
            if order is None:
                raise ValueError("gate and up lie in an unknown column order")
            nodes = (gate.key[0], up.key[0]) if order == "separate" else (gate.key[0],)
            yield Activation(kind, order, limit, clamp, alpha, beta), nodes


def _column_order(gate: Any, up: Any, width: int) -> str | None:
    """The column map, from the positions of gate and up in their leaves."""
    (gate_node, gate_at), (up_node, up_at) = gate, up
    low, high = tuple(range(width)), tuple(range(width, 2 * width))
    even, odd = tuple(range(0, 2 * width, 2)), tuple(range(1, 2 * width, 2))
    if gate_node is not up_node:
        return "separate" if gate_at == up_at == low else None
    known = {(low, high): "concat", (high, low): "concat_up_first", (even, odd): "interleaved", (odd, even): "interleaved_up_first"}
    return known.get((gate_at, up_at))


Variant = tuple[str, float | None, str | None, float, float]


def _variants(a: Algebra, expr: Expr, g: Expr, u: Expr) -> Iterator[Variant]:
    """Every named variant that `expr` equals, for this choice of gate and up."""
    for kind, formula in (("swiglu", g * a.sigmoid(g) * u), ("geglu", a.gelu(g, "none") * u), ("geglu_tanh", a.gelu(g, "tanh") * u)):
        if expr == formula:
            yield kind, None, None, 1.0, 0.0
    for limit in _limits(a, expr):
        bound = a.constant_fraction(limit)
        gate, up = a.minimum(g, bound), a.maximum(a.minimum(u, bound), -bound)
        if expr == gate * a.sigmoid(gate) * up:
            yield "swiglu", float(limit), "pre", 1.0, 0.0
            continue
        if expr == a.minimum(g * a.sigmoid(g), bound) * up:
            yield "swiglu", float(limit), "post", 1.0, 0.0
            continue
        for alpha in _alphas(a, expr, gate):
            weight = gate * a.sigmoid(a.constant_fraction(alpha) * gate)
            beta = expr / weight - up
            if a.is_constant(beta):
                yield "swiglu_oai", float(limit), "pre", float(alpha), float(a.to_fraction(beta))


def _limits(a: Algebra, expr: Expr) -> list[Fraction]:
    """Positive knots of the clamps in the expression."""
    return sorted({abs(atom.key[1]) for atom in a.atoms_of(expr) if atom.kind == "relu" and atom.key[1] != 0})


def _alphas(a: Algebra, expr: Expr, gate: Expr) -> list[Fraction]:
    found = []
    for atom in a.atoms_of(expr):
        if atom.kind == "sigmoid":
            ratio = atom.key[0] / gate
            if a.is_constant(ratio):
                found.append(abs(a.to_fraction(ratio)))
    return found


def fingerprint(output: fx.Node, leaves: Sequence[fx.Node]) -> str:
    """A hash of a region's ops, constants and wiring, without names: equal for experts that compute the same."""
    numbers: dict[fx.Node, str] = {leaf: f"leaf{i}" for i, leaf in enumerate(leaves)}
    lines = []
    for i, node in enumerate(region_nodes(output, leaves)):
        numbers[node] = f"n{i}"
        if isinstance(value(node), torch.SymInt):
            lines.append("size")
            continue
        arguments = fx.map_arg((node.args, node.kwargs), lambda n: numbers.get(n, "other"))
        what = node.target if node.op == "call_function" else node.op
        lines.append(f"{what}{arguments}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
