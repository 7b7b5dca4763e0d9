"""Predicates and their outcomes: the language, concrete sizes, ranges, and soundness against brute force."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefx.contract import Contract, Predicate, Range, evaluate


def status(text: str, **facts: Any) -> str:
    return evaluate(Predicate(text), facts).status


def test_concrete_sizes() -> None:
    found = evaluate(Predicate("D // 8 >= E"), {"D": 512, "E": 128})
    assert (found.status, found.lhs, found.rhs, found.values) == ("refuted", 64, 128, {"D": 512, "E": 128})
    assert status("D // 8 >= E", D=512, E=64) == "proved"
    assert status("0 < D // 8 <= 1024", D=8192) == "proved"
    assert status("0 < D // 8 <= 1024", D=8200) == "refuted"
    assert status("clamp in (None, 'pre')", clamp=None) == "proved"
    assert status("clamp in (None, 'pre')", clamp="post") == "refuted"


def test_ranges() -> None:
    assert status("N % 4 == 0", N=Range(0, None, 128)) == "proved"
    assert status("N >= 128", N=Range(128, None, 128)) == "proved"
    assert status("N + T > T", N=Range(1), T=Range(0)) == "proved"
    found = evaluate(Predicate("T <= 3"), {"T": Range(0)})
    assert found.status == "refuted" and found.values["T"] == 4
    assert status("T <= 10000", T=Range(0, 9000)) == "proved"
    assert status("T % 40961 != 40960", T=Range(0)) == "unknown"


def test_what_is_not_known() -> None:
    found = evaluate(Predicate("D // 8 >= E"), {"D": 512})
    assert found.status == "unknown" and "E" in found.needs


@pytest.mark.parametrize("text", ["D.bit_length() > 2", "__import__('os')", "D ** 2 > E", "[D]", "D if E else 1", "lambda: 1", "Z > 1"])
def test_the_language_is_small(text: str) -> None:
    with pytest.raises(ValueError, match="predicate"):
        Predicate(text)


def test_a_contract_is_as_good_as_its_worst_predicate() -> None:
    contract = Contract("k", (Predicate("D % 128 == 0"), Predicate("E <= 4"), Predicate("T % 40961 != 40960")))
    assert contract.evaluate({"D": 128, "E": 5, "T": Range(0)}).status == "refuted"
    assert contract.evaluate({"D": 128, "E": 4, "T": Range(0)}).status == "unknown"
    assert contract.evaluate({"D": 128, "E": 4, "T": 7}).status == "proved"
    failed = contract.evaluate({"D": 128, "E": 5, "T": 7}).first_failure()
    assert failed is not None and failed.text == "E <= 4"


NAMES = ("D", "E", "N")
terms = st.recursive(
    st.one_of(st.sampled_from(NAMES), st.integers(0, 9).map(str)),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*"]), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(inner, st.sampled_from(["//", "%"]), st.integers(1, 8)).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
    ),
    max_leaves=5,
)
comparisons = st.tuples(terms, st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), terms).map(lambda t: f"{t[0]} {t[1]} {t[2]}")
predicates = st.one_of(comparisons, st.tuples(comparisons, st.sampled_from(["and", "or"]), comparisons).map(" ".join))
ranges = st.one_of(
    st.integers(0, 12),
    st.tuples(st.integers(0, 6), st.one_of(st.none(), st.integers(6, 30)), st.integers(1, 4)).map(lambda t: Range(*t)),
)


def members(fact: Any) -> list[int]:
    if isinstance(fact, int):
        return [fact]
    top = fact.maximum if fact.maximum is not None else 40
    return [n for n in range(fact.minimum, top + 1) if n % fact.multiple_of == 0]


def agrees(text: str, facts: dict[str, Any]) -> int:
    """Compare the outcome with every assignment in range (up to 40); returns how many."""
    found = evaluate(Predicate(text), facts)
    grid = [dict(zip(NAMES, values, strict=True)) for values in itertools.product(*(members(facts[n]) for n in NAMES))]
    truths = [bool(eval(text, {}, at)) for at in grid]  # noqa: S307
    if found.status == "proved":
        assert all(truths), (text, facts, grid[truths.index(False)])
    if found.status == "refuted":
        at = {n: v for n, v in found.values.items() if isinstance(v, int)}
        full = {n: at.get(n, members(facts[n])[0] if members(facts[n]) else 0) for n in NAMES}
        assert not eval(text, {}, full), (text, facts, found)  # noqa: S307
    if all(isinstance(f, int) for f in facts.values()):
        assert found.status == ("proved" if truths[0] else "refuted")
    return len(grid)


@settings(max_examples=150, deadline=None)
@given(text=predicates, facts=st.fixed_dictionaries(dict.fromkeys(NAMES, ranges)))
def test_outcomes_agree_with_brute_force(text: str, facts: dict[str, Any]) -> None:
    agrees(text, facts)


@pytest.mark.slow
def test_a_hundred_thousand_assignments() -> None:
    total = 0

    @settings(max_examples=3000, deadline=None)
    @given(text=predicates, facts=st.fixed_dictionaries(dict.fromkeys(NAMES, ranges)))
    def check(text: str, facts: dict[str, Any]) -> None:
        nonlocal total
        total += agrees(text, facts)

    check()
    assert total > 100_000
