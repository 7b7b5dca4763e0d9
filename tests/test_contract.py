"""Predicates and their outcomes: the language, concrete sizes, ranges, and soundness against brute force."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefx.contract import Contract, Derived, Predicate, Range, evaluate


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


def test_the_language_knows_min_max_and_align() -> None:
    assert status("align(T, 128) % 4 == 0", T=Range(0)) == "proved"
    assert status("N % 4 == 0", N=Derived("max(128, align(T, 128))"), T=Range(0)) == "proved"
    assert status("N >= T", N=Derived("align(T, 128)"), T=Range(0)) == "unknown", "true, and beyond the algebra: never refuted"
    assert status("min(T, 8) <= 8 <= max(T, 8)", T=Range(0)) == "proved"
    found = evaluate(Predicate("N >= 128"), {"N": Derived("align(T, 64)"), "T": Range(0)})
    assert (found.status, found.values) == ("refuted", {"N": 0, "T": 0})
    with pytest.raises(ValueError, match="may be called"):
        Predicate("max(D) > 1")


def test_upper_bounds_of_ranges_are_used() -> None:
    assert status("E <= 256", E=Range(1, 256)) == "proved"
    assert status("T * K < 2147483648", T=Range(0, 1 << 20), K=8) == "proved"
    assert status("T * K < 2147483648", T=Range(0, 1 << 30), K=8) == "refuted"


def test_traced_sizes_are_asked_of_the_shape_env_without_a_guard() -> None:
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    env = ShapeEnv()
    dynamic = env.create_symintnode(
        env.create_symbol(37, ConstantSource("t"), dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None), hint=37, source=ConstantSource("t")
    )
    rows = dynamic * 8
    before = (len(env.guards), dict(env.replacements), dict(env.var_to_range))
    assert status("N % 4 == 0", N=rows) == "proved"
    assert status("N % 16 == 0", N=rows) == "unknown"
    assert status("N % 4 == 1", N=rows) == "refuted"
    assert status("N >= T", N=rows, T=dynamic) == "proved"
    assert status("T <= 64", T=dynamic) == "unknown"
    assert status("E <= 4 and T >= 0", T=dynamic, E=4) == "proved"
    assert (len(env.guards), dict(env.replacements), dict(env.var_to_range)) == before


def test_a_guard_is_for_what_depends_on_tokens_alone() -> None:
    contract = Contract("k", (Predicate("T <= 64"), Predicate("D % 8 == 0"), Predicate("N <= 256")))
    known = {"T": Range(0), "D": 64, "N": Derived("align(T, 128)")}
    found = contract.evaluate(known, guards=True)
    assert found.status == "guarded" and found.guard() == "(T <= 64) and (align(T, 128) <= 256)"
    assert contract.evaluate(known).status == "refuted"
    assert contract.evaluate({**known, "D": 60}, guards=True).status == "refuted"
    assert contract.evaluate({**known, "D": Range(8)}, guards=True).status == "refuted"
    assert Contract("k", (Predicate("T < 0"),)).evaluate({"T": Range(0)}, guards=True).status == "refuted", "no T would ever pass"


@pytest.mark.parametrize("text", ["T + (E > 1) >= 1", "(T >= 1) == True", "not T % 4", "T and E >= 1", "T", "min(T > 1, 2) >= 1"])
def test_a_condition_is_never_a_number(text: str) -> None:
    with pytest.raises(ValueError, match="predicate"):
        Predicate(text)


def test_facts_that_make_no_sense() -> None:
    for step in (0, -2):
        with pytest.raises(ValueError, match="multiple_of"):
            Range(0, None, step)
    for text in ("T +", "T / 2", "T > 1"):
        with pytest.raises(ValueError, match="predicate"):
            Derived(text)
    with pytest.raises(ValueError, match="derived from each other"):
        status("N >= 1", N=Derived("E"), E=Derived("N"))
    assert status("limit <= 10", limit=None) == "refuted"
    assert status("T >= 9 or N >= 5", N=Derived("64 // T"), T=Range(0)) == "refuted"


def test_traced_sizes_that_may_be_zero_divide_nothing() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv()
    unbacked = env.create_unbacked_symint()
    torch._check(unbacked >= 0)
    assert status("64 // T >= 0", T=unbacked) == "unknown"
    assert status("not (T // (E - 5) > 1)", T=unbacked, E=5) == "unknown"
    assert status("T >= 0", T=unbacked) == "proved"
