"""Soundness of contracts: the language's edges, points between the samples, and random predicates against dense grids.

What is right is Python's own truth of the predicate's text; a division by zero is no truth. "proved" allows no false point in range,
"refuted" shows a point in range that is false, and "unknown" is always allowed for ranges.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefx import contract
from moefx.contract import Contract, Predicate, PredicateOutcome, Range, evaluate

QUICK = settings(max_examples=120, deadline=None, derandomize=True, database=None)


def truth(text: str, values: Mapping[str, Any]) -> bool:
    try:
        return bool(eval(text, {"__builtins__": {}}, dict(values)))  # noqa: S307
    except ZeroDivisionError:
        return False


def member(value: int, bounds: Range) -> bool:
    return value >= bounds.minimum and value % bounds.multiple_of == 0 and (bounds.maximum is None or value <= bounds.maximum)


def dense(bounds: Range, count: int) -> list[int]:
    """The first `count` integers of a range."""
    found = (n for n in itertools.count(bounds.minimum) if n % bounds.multiple_of == 0)
    last = bounds.maximum
    return list(itertools.islice(found if last is None else itertools.takewhile(lambda n: n <= last, found), count))


def grid(facts: Mapping[str, Any], count: int) -> Iterator[dict[str, Any]]:
    """Every assignment; T gets 70 values, so that it reaches what lies between the small and the boundary samples."""
    axes = [[(n, v) for v in (dense(f, 70 if n == "T" else count) if isinstance(f, Range) else [f])] for n, f in facts.items()]
    return (dict(point) for point in itertools.product(*axes))


def sound(text: str, facts: Mapping[str, Any], outcome: PredicateOutcome, count: int = 10) -> None:
    """No "proved" with a counterexample in the grid, no "refuted" by a point that is out of range or satisfies the text."""
    if outcome.status == "proved":
        wrong = next((p for p in grid(facts, count) if not truth(text, p)), None)
        assert wrong is None, f"{text!r} on {facts} is proved, and false at {wrong}"
    elif outcome.status == "refuted":
        point = outcome.values
        assert all(member(point[n], f) for n, f in facts.items() if isinstance(f, Range) and n in point), (text, facts, outcome)
        assert not truth(text, point), f"{text!r} on {facts} is refuted by {point}, which satisfies it"
    else:
        assert outcome.status == "unknown" and outcome.needs, outcome


def sound_or_rejected(text: str, facts: Mapping[str, Any]) -> None:
    """A narrower language that rejects the text, and names it, is as good as an outcome."""
    try:
        predicate = Predicate(text)
    except ValueError as error:
        assert repr(text) in str(error)
        return
    sound(text, facts, evaluate(predicate, facts))


def on(text: str, **facts: Any) -> PredicateOutcome:
    return evaluate(Predicate(text), facts)


@pytest.mark.parametrize(
    "text", ["D >=", "", "D >= 1; E >= 1", "D = 4", "(D >= 1", "D ** 2 >= E", "len(dtype) == 8", "D is None", "Q >= 1"]
)
def test_what_is_outside_the_language_is_rejected_by_its_text(text: str) -> None:
    with pytest.raises(ValueError) as error:
        Predicate(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize("text", ["T > 5,", "(T > 5, E > 5)", "T > 5 or (T > 6,)"])
def test_a_stray_comma_makes_no_condition_that_always_holds(text: str) -> None:
    try:
        predicate = Predicate(text)
    except ValueError as error:
        assert repr(text) in str(error)
    else:
        assert evaluate(predicate, {"T": 3, "E": 3}).status == "refuted"


@pytest.mark.parametrize("experts", [64, 65, 100, 128, 256])
def test_the_founding_case_over_ranges(experts: int) -> None:
    """D in steps of 256: the first D with D // 8 >= E decides."""
    need = next(d for d in range(256, 10000, 256) if d // 8 >= experts)
    assert on("D // 8 >= E", D=Range(need, None, 256), E=experts).status == "proved"
    below = on("D // 8 >= E", D=Range(need - 256, None, 256), E=experts)
    assert (below.status, below.values["D"], below.lhs, below.rhs) == ("refuted", need - 256, (need - 256) // 8, experts)


JIT = (
    "N % 4 == 0",
    "G % 4 == 0",
    "D // 8 >= E",
    "D % 128 == 0",
    "(D // 8) % 32 == 0",
    "0 < D // 8 <= 1024",
    "E <= 256",
    "dtype == 'bfloat16'",
)
FITS: dict[str, Any] = {"N": 128, "G": 4, "D": 512, "E": 64, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    "change, failing",
    [
        ({"N": Range(128, None, 128)}, set()),
        ({"N": Range(2, None, 2)}, {"N % 4 == 0"}),
        ({"G": 6}, {"G % 4 == 0"}),
        ({"E": 65}, {"D // 8 >= E"}),
        ({"D": 640}, {"(D // 8) % 32 == 0"}),
        ({"D": 576}, {"D % 128 == 0", "(D // 8) % 32 == 0"}),
        ({"D": 8192}, set()),
        ({"D": 8448}, {"0 < D // 8 <= 1024"}),
        ({"D": 0}, {"0 < D // 8 <= 1024", "D // 8 >= E"}),
        ({"D": 4096, "E": 257}, {"E <= 256"}),
        ({"dtype": "float32"}, {"dtype == 'bfloat16'"}),
    ],
)
def test_a_contract_fails_by_exactly_the_predicates_that_are_false(change: dict[str, Any], failing: set[str]) -> None:
    outcome = Contract("jit", tuple(Predicate(t) for t in JIT)).evaluate({**FITS, **change})
    assert {p.text for p in outcome.predicates if p.status == "refuted"} == failing
    assert {p.text for p in outcome.predicates if p.status == "proved"} == set(JIT) - failing
    assert outcome.status == ("refuted" if failing else "proved")


ORDER = ("refuted", "unknown", "guarded", "proved")


@pytest.mark.parametrize("states", [s for n in (1, 2, 3) for s in itertools.product(ORDER, repeat=n)])
def test_the_worst_predicate_decides(states: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"T >= {i}" for i in range(len(states))]
    by_text = dict(zip(names, states, strict=True))
    monkeypatch.setattr(contract, "evaluate", lambda p, facts: PredicateOutcome(p.text, {}, None, None, by_text[p.text]))
    outcome = Contract("k", tuple(Predicate(n) for n in names)).evaluate({})
    assert outcome.status == min(states, key=ORDER.index)


@pytest.mark.parametrize(
    "text, bounds",
    [
        ("T <= 100", Range(0)),
        ("T < 40", Range(0)),
        ("T <= 100", Range(0, None, 8)),
        ("T * T <= 50", Range(0)),
        ("T != 6", Range(0)),
        ("T > 8", Range(5, None, 4)),
        ("T >= 0", Range(-7, None, 4)),
        ("T % 512 == 0", Range(512, 1000, 128)),
    ],
)
def test_the_counterexample_is_the_smallest(text: str, bounds: Range) -> None:
    outcome = on(text, T=bounds)
    assert outcome.status == "refuted"
    assert outcome.values["T"] == next(n for n in dense(bounds, 1000) if not truth(text, {"T": n}))


@pytest.mark.parametrize("text", ["T >= 1", "T == 0", "T <= 0 or T >= 4"])
@pytest.mark.parametrize("bounds", [(1, 3, 4), (5, 3, 1), (9, 15, 8)])
def test_an_empty_range_is_not_refuted_by_a_point_outside_it(text: str, bounds: tuple[int, int, int]) -> None:
    try:
        facts = {"T": Range(*bounds)}
    except ValueError:
        return
    outcome = on(text, **facts)
    assert outcome.status != "refuted" or member(outcome.values["T"], facts["T"]), outcome


def hidden(claim: str) -> str:
    """A claim that only counts for 9 <= T <= 62, so that small values and powers of two never refute it: a proof must be right alone."""
    return f"T < 9 or T > 62 or ({claim})"


@pytest.mark.parametrize(
    "claim, more",
    [
        ("T % -3 >= 0", {}),
        ("T % (E - 5) >= 0", {"E": 3}),
        ("T % (1 - E) >= 0", {"E": Range(2)}),
        ("-(T + 5) % -3 == -T - 5", {}),
        ("T // 2 // -3 == T // -6", {}),
        ("T // 2 // (E - 5) == T // (2 * E - 10)", {"E": 2}),
        ("T // 4 // -E == -(T // (4 * E))", {"E": Range(1)}),
        ("(T - 50) % (T - 50) == 0", {}),
        ("(T - 50) // (T - 50) == 1", {}),
        ("0 // (T - 50) == 0", {}),
        ("T * (T - 50) // (T - 50) == T", {}),
        ("0 * (T // (T - 50)) == 0", {}),
        ("T // (T - 50) >= -99 or E == 0", {"E": 0}),
        ("(not T % 20) <= 0", {}),
        ("T % 20 >= 0.5", {}),
        ("T * 0.5 == 0", {}),
        ("0 <= T % 20 <= 18", {}),
        ("-T // 4 == -(T // 4)", {}),
        ("-T % 4 == -(T % 4)", {}),
        ("(E - T) % 4 <= E", {"E": Range(0)}),
    ],
)
def test_a_claim_that_is_false_in_range_is_never_proved(claim: str, more: dict[str, Any]) -> None:
    text, facts = hidden(claim), {"T": Range(0), **more}
    assert not all(truth(text, point) for point in grid(facts, 10)), "the claim must have a counterexample"
    sound_or_rejected(text, facts)


@pytest.mark.parametrize(
    "text, facts",
    [
        ("T + (E - 5) % 4 >= 0", {"T": Range(0), "E": 3}),
        ("(T - T - 3) % 4 == 1", {"T": Range(0)}),
        ("T + E % -4 >= -3", {"T": Range(0), "E": 3}),
        ("T in (4, 8)", {"T": Range(4, 8, 4)}),
        ("T not in (17, 33)", {"T": Range(0)}),
        ("T in (17, 33) or T >= 0", {"T": Range(0)}),
        ("(T >= 1) == True", {"T": Range(1)}),
        ("(T and E) >= 0", {"T": Range(1), "E": 4}),
        ("T != dtype", {"T": Range(0), "dtype": "bfloat16"}),
        ("T != clamp", {"T": Range(0), "clamp": None}),
        ("not T % 4", {"T": Range(0, None, 4)}),
        ("T // E >= 0", {"T": 4, "E": 0}),
        ("T % E == 0", {"T": Range(0), "E": 0}),
        ("T // E >= 0", {"T": Range(0), "E": Range(0)}),
        ("E == 0 or T // E >= 0", {"T": Range(0), "E": Range(0)}),
    ],
)
def test_every_predicate_has_an_outcome_or_is_rejected_by_its_text(text: str, facts: dict[str, Any]) -> None:
    sound_or_rejected(text, facts)


def expression(rng: random.Random, dims: list[str], depth: int, wild: bool, minus: bool = True) -> str:
    """An integer expression. Tame ones divide by positive constants alone, and take no remainder of a difference."""
    if depth == 0 or rng.random() < 0.2:
        return rng.choice(dims) if rng.random() < 0.7 else str(rng.randint(0, 9))
    op = rng.choice(["+", "-", "*", "//", "%"] if minus else ["+", "*", "//", "%"])
    left = expression(rng, dims, depth - 1, wild, minus and (wild or op != "%"))
    if op in ("//", "%") and not wild:
        return f"({left} {op} {rng.randint(1, 9)})"
    if op in ("//", "%") and rng.random() < 0.5:
        return f"({left} {op} {rng.choice([-6, -3, -2, -1, 2, 4, 8])})"
    return f"({left} {op} {expression(rng, dims, depth - 1, wild, minus)})"


def condition(rng: random.Random, dims: list[str], wild: bool) -> str:
    """A comparison, at times chained or joined. Most are near truths, so that many are proved and the proofs are what is tested."""

    def some(minus: bool = True) -> str:
        return expression(rng, dims, 2, wild, minus)

    a = some(wild)
    b, c = (str(rng.choice([-6, -3, -2, 2, 3, 8]) if wild else rng.randint(1, 9)) for _ in range(2))
    near = [
        f"{a} % {b} >= 0",
        f"{a} % {b} < {b.lstrip('-')}",
        f"{a} // {b} // {c} == {a} // ({b} * {c})",
        f"{a} // {b} * {b} <= {a}",
        f"({a} * {b}) // {b} == {a}",
        f"({a} * {b}) % {b} == 0",
        f"({a} + {b}) // {b} == {a} // {b} + 1",
        f"{a} // {b} >= 0",
        f"{a} + {c} > {a}",
        f"{a} % {b} == {a} - {a} // {b} * {b}",
        f"{a} % {b} == {a}",
        f"0 <= {a} % {b} <= {a}",
    ]
    compare = ["==", "!=", "<", "<=", ">", ">="]
    kind = rng.random()
    if kind < 0.6:
        return rng.choice(near)
    if kind < 0.7:
        return f"{some()} {rng.choice(compare)} {some()} {rng.choice(compare)} {some()}"
    if kind < 0.8:
        left, right = (f"{some()} {rng.choice(compare)} {some()}" for _ in range(2))
        return f"({left} {rng.choice(['and', 'or'])} {right})"
    return f"{some()} {rng.choice(compare)} {some()}"


def case(rng: random.Random, wild: bool) -> tuple[str, dict[str, Any]]:
    dims = ["T", "N", "E"][: rng.randint(1, 3)]
    text = condition(rng, dims, wild)
    facts: dict[str, Any] = {}
    for name in dims:
        low, step = rng.randint(-9 if wild else 0, 20), rng.choice([1, 1, 2, 3, 4, 8])
        high = None if rng.random() < 0.6 else low + step + rng.randint(0, 60)
        facts[name] = low if rng.random() < 0.3 else Range(low, high, step)
    return (hidden(text), {**facts, "T": Range(0)}) if rng.random() < 0.4 else (text, facts)


def concrete(text: str, facts: dict[str, Any]) -> None:
    outcome = evaluate(Predicate(text), facts)
    assert (outcome.status == "proved") == truth(text, facts), (text, facts, outcome)
    sound(text, facts, outcome)


KIND = pytest.mark.parametrize("wild", [False, True], ids=["tame", "wild"])


@KIND
@QUICK
@given(rng=st.randoms(use_true_random=False))
def test_random_predicates_over_ranges_are_sound(wild: bool, rng: random.Random) -> None:
    text, facts = case(rng, wild)
    sound(text, facts, evaluate(Predicate(text), facts), 7)


@KIND
@QUICK
@given(rng=st.randoms(use_true_random=False))
def test_concrete_facts_have_the_truth_of_python(wild: bool, rng: random.Random) -> None:
    dims = ["T", "N", "E"][: rng.randint(1, 3)]
    concrete(condition(rng, dims, wild), {n: rng.randint(-20, 300) for n in dims})


def test_the_random_predicates_reach_every_outcome() -> None:
    """Soundness says something only if many are proved and many refuted."""
    rng = random.Random(7)
    states = [evaluate(Predicate(t), f).status for t, f in (case(rng, False) for _ in range(200))]
    assert min(states.count(s) for s in ("proved", "refuted", "unknown")) >= 10


@pytest.mark.slow
@KIND
def test_a_hundred_thousand_assignments(wild: bool) -> None:
    """Each of 1,000 predicates over ranges against 100 assignments from the ranges; each assignment is evaluated alone as well."""
    rng = random.Random(20 + wild)
    for _ in range(1000):
        text, facts = case(rng, wild)
        outcome = evaluate(Predicate(text), facts)
        sound(text, facts, outcome, 4)
        for _ in range(100):
            point = {n: rng.choice(dense(f, rng.choice([10, 400]))) if isinstance(f, Range) else f for n, f in facts.items()}
            assert outcome.status != "proved" or truth(text, point), (text, facts, point)
            concrete(text, point)
