"""Contracts: what a kernel needs, as predicates over named dims, and what is known of them.

A predicate is written as it is read, `Predicate("D // 8 >= E")`, over the dims and categorical facts below; `min`, `max` and
`align(n, m)` (n rounded up to a multiple of m) may be used. Evaluated on facts it has one of four outcomes:

- proved: true for every size in the declared ranges;
- refuted: false for sizes in range; the counterexample is the smallest found;
- guarded: it depends on the number of tokens alone, and a guard decides at run time between two proved lowerings;
- unknown: neither could be shown; `needs` says what would decide it.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from moefx import prove
from moefx.prove import Derived, Range

__all__ = ["CATEGORIES", "DIMS", "Contract", "Derived", "Outcome", "Pad", "Predicate", "PredicateOutcome", "Range", "evaluate"]

DIMS = ("T", "N", "K", "H", "D", "E", "E_total", "G", "S", "D_shared", "ep_size")
CATEGORIES = (
    "dtype",
    "weight_format",
    "activation",
    "clamp",
    "limit",
    "columns",
    "bias",
    "target",
    "isa",
    "precision",
    "a2a",
    "shared_activation",
    "shared_clamp",
    "shared_limit",
    "shared_bias",
    "shared_weight_format",
)
RUN_TIME = ("T",)
"""Dims a guard may read at a call."""

Facts = Mapping[str, Any]
"""Values by name: integers, `Range`s, `Derived` texts over other facts, torch.SymInts, and categorical values."""


@dataclass(frozen=True)
class Predicate:
    """One condition; `why` is the property of the kernel behind it. ValueError where the text is not in the language."""

    text: str
    why: str = ""

    def __post_init__(self) -> None:
        prove.check(self.text, (*DIMS, *CATEGORIES))


@dataclass(frozen=True)
class PredicateOutcome:
    text: str
    values: dict[str, Any]
    lhs: int | None
    rhs: int | None
    status: str
    needs: str = ""
    why: str = ""
    guard: str = ""

    def to_json(self) -> dict[str, Any]:
        found = {"text": self.text, "values": self.values, "lhs": self.lhs, "rhs": self.rhs, "status": self.status}
        return {**found, **{k: v for k, v in (("needs", self.needs), ("why", self.why), ("guard", self.guard)) if v}}


@dataclass(frozen=True)
class Outcome:
    """A contract on facts: refuted when one predicate is, unknown when one is, guarded when one is, else proved.

    `repair`: what moefx changed for this candidate, in words; `bytes_moved`: the estimate of `Kernel.bytes_moved`, where one was made.
    """

    kernel: str
    status: str
    predicates: tuple[PredicateOutcome, ...]
    value_checks: tuple[str, ...] = ()
    repair: str = ""
    bytes_moved: int | None = None

    def first_failure(self) -> PredicateOutcome | None:
        return next((p for p in self.predicates if p.status in ("refuted", "unknown")), None)

    def guard(self) -> str:
        """The run-time condition on T under which every predicate holds; empty unless the status is guarded."""
        return " and ".join(f"({p.guard})" for p in self.predicates if p.status == "guarded")

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "kernel": self.kernel,
            "status": self.status,
            "predicates": [p.to_json() for p in self.predicates],
            "value_checks": list(self.value_checks),
        }
        if self.repair:
            found["repair"] = self.repair
        if self.bytes_moved is not None:
            found["bytes_moved"] = self.bytes_moved
        return found


@dataclass(frozen=True)
class Pad:
    """A repair moefx may offer: `dim` ("D" or "H") padded with zeros to a multiple."""

    dim: str
    multiple: int

    def __post_init__(self) -> None:
        if self.dim not in ("D", "H") or self.multiple < 1:
            raise ValueError(f"Pad({self.dim!r}, {self.multiple}) must name D or H and a multiple of at least 1")


@dataclass(frozen=True)
class Contract:
    """What `kernel` needs. `precisions` and `targets`: the requests it is a candidate for; `value_checks`: conditions on values, apart.

    `pads`: the dims that may be padded where the contract fails as the facts are.
    """

    kernel: str
    predicates: tuple[Predicate, ...]
    value_checks: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ("preserve",)
    targets: tuple[str, ...] = field(default=("cpu",))
    pads: tuple[Pad, ...] = ()

    def evaluate(self, facts: Facts, suffix: str = "", guards: bool = False) -> Outcome:
        """The outcome on facts. With `guards`, what depends on T alone and holds for some T is guarded."""
        outcomes = tuple(evaluate(p, facts) for p in self.predicates)
        if guards:
            outcomes = tuple(_guarded(o, facts) for o in outcomes)
        states = {o.status for o in outcomes}
        status = next((s for s in ("refuted", "unknown", "guarded") if s in states), "proved")
        return Outcome(self.kernel + suffix, status, outcomes, self.value_checks)


def evaluate(predicate: Predicate, facts: Facts) -> PredicateOutcome:
    """The outcome of one predicate on facts."""
    text, why = predicate.text, predicate.why
    names = prove.names_in(text)
    shown = {n: prove.shown(facts[n]) for n in names if n in facts}
    tree = prove.expand(prove.parse(text), facts)
    missing = sorted(prove.free_names(tree) - facts.keys())
    if missing:
        return PredicateOutcome(text, shown, None, None, "unknown", f"the value of {', '.join(missing)}", why)
    values = {n: facts[n] for n in prove.free_names(tree)}
    if any(prove.is_symbolic(v) for v in values.values()):
        status = prove.with_symbols(tree, values)
        return PredicateOutcome(text, shown, None, None, status, "" if status != "unknown" else "a bound of the traced sizes", why)
    ranged = {n: v for n, v in values.items() if isinstance(v, Range)}
    if not ranged:
        lhs, rhs = prove.sides(tree, values)
        return PredicateOutcome(text, shown, lhs, rhs, "proved" if prove.truth(tree, values) else "refuted", why=why)
    counterexample = prove.counterexample(tree, values, ranged)
    if counterexample is not None:
        at = {**values, **counterexample}
        lhs, rhs = prove.sides(tree, at)
        derived = {n: prove.value_at(facts[n], facts, at) for n in shown if isinstance(facts[n], Derived)}
        return PredicateOutcome(text, {**shown, **derived, **counterexample}, lhs, rhs, "refuted", why=why)
    if prove.proved(tree, values):
        return PredicateOutcome(text, shown, None, None, "proved", why=why)
    return PredicateOutcome(text, shown, None, None, "unknown", f"narrower bounds of {', '.join(ranged)}", why)


def _guarded(outcome: PredicateOutcome, facts: Facts) -> PredicateOutcome:
    """A predicate that is not proved, as a guard on T: when T is its only unknown, and it holds for some T in range."""
    if outcome.status == "proved":
        return outcome
    tree = prove.expand(prove.parse(outcome.text), facts)
    names = prove.free_names(tree)
    if not names <= facts.keys() or any(prove.is_symbolic(facts[n]) for n in names):
        return outcome
    ranged = {n: facts[n] for n in names if isinstance(facts[n], Range)}
    if not ranged or not ranged.keys() <= set(RUN_TIME) or prove.witness(tree, {n: facts[n] for n in names}, ranged) is None:
        return outcome
    constant = prove.substituted(tree, {n: facts[n] for n in names - ranged.keys()})
    return replace(outcome, status="guarded", guard=ast.unparse(constant), needs="")
