"""Every kernel's own contract: its outcomes against brute force, and launches wherever it holds."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from moefx.activation.spec import Activation
from moefx.contract import Contract, evaluate
from moefx.kernels.base import Kernel
from moefx.kernels.cpu import build
from moefx.kernels.registry import KERNELS, by_name
from moefx.placement import GLOBAL_SLOT, RANK_SLOT
from moefx.prove import FUNCTIONS, Derived, Range, names_in

CONTRACTS = [*(k.contract for k in KERNELS), GLOBAL_SLOT, RANK_SLOT]
BOUNDARIES = {
    "T": [0, 1, 127, 128, 129, 4096],
    "K": [1, 2, 8, 10],
    "H": [0, 8, 64, 127, 128, 2048, 2880],
    "D": [0, 8, 64, 127, 128, 255, 256, 384, 512, 1024, 1408, 8192, 8193, 8448],
    "E": [1, 2, 63, 64, 65, 128, 255, 256, 257, 512],
    "E_total": [1, 8, 60, 256, 512],
    "S": [0, 1, 2],
    "D_shared": [0, 128, 512, 1024, 5632],
    "ep_size": [1, 2, 3, 8, 16],
}
CHOICES: dict[str, list[Any]] = {
    "dtype": ["bfloat16", "float32"],
    "weight_format": ["bfloat16", "float16", "float32", "float8_e4m3fn", "uint8"],
    "activation": ["swiglu", "swiglu_oai", "relu2", "opaque"],
    "clamp": [None, "pre", "post"],
    "limit": [None, 7.0, 10.0],
    "columns": ["concat", "interleaved"],
    "bias": [False, True],
    "target": ["cpu", "sm90", "sm100"],
    "isa": [None, "avx2", "avx512", "avx512_bf16"],
    "precision": ["preserve", "fp8"],
    "a2a": ["local", "mori"],
}
CHOICES |= {f"shared_{n}": CHOICES[n] for n in ("activation", "clamp", "limit", "bias", "weight_format")}


def facts(rng: random.Random) -> dict[str, Any]:
    """Boundary sizes, some dims as ranges around them."""
    found: dict[str, Any] = {n: rng.choice(v) for n, v in CHOICES.items()}
    for name, values in BOUNDARIES.items():
        value = max(0, rng.choice(values) + rng.choice([0, 0, 0, -1, 1]))
        step = rng.choice([1, 1, 8, 64, 128, 256])
        high = rng.choice([None, value + rng.choice([0, step, 5 * step])])
        found[name] = Range(value, high, step) if rng.random() < 0.3 else value
    found["N"] = Derived(rng.choice(["max(128, align(T, 128))", "align(T, 4)", "align(T, 2)", "T"]))
    found["G"] = Derived("D // 128")
    return found


def point(known: dict[str, Any], rng: random.Random) -> dict[str, Any] | None:
    """One assignment of every range; derived dims by Python. None where a range is empty."""
    at: dict[str, Any] = {}
    for name, value in known.items():
        if isinstance(value, Range):
            low = -(-value.minimum // value.multiple_of)
            high = low + 300 if value.maximum is None else value.maximum // value.multiple_of
            if high < low:
                return None
            at[name] = rng.choice([low, high, rng.randint(low, high)]) * value.multiple_of
        else:
            at[name] = value
    for name, value in known.items():
        if isinstance(value, Derived):
            at[name] = eval(value.text, dict(FUNCTIONS), at)  # noqa: S307
    return at


def holds(text: str, at: dict[str, Any]) -> bool:
    try:
        return bool(eval(text, dict(FUNCTIONS), at))  # noqa: S307
    except ZeroDivisionError:
        return False


def compare(contract: Contract, rng: random.Random, points: int) -> int:
    known = facts(rng)
    outcomes = [evaluate(p, known) for p in contract.predicates]
    for outcome in outcomes:
        assert outcome.status in ("proved", "refuted", "unknown")
        if outcome.status == "refuted":
            at = {**known, **outcome.values}
            for name in names_in(outcome.text):
                if isinstance(known[name], Derived):
                    at[name] = eval(known[name].text, dict(FUNCTIONS), at)  # noqa: S307
            assert not holds(outcome.text, at), (outcome, known)
    done = 0
    for _ in range(points):
        at = point(known, rng)
        if at is not None:
            done += 1
            for outcome in outcomes:
                assert outcome.status != "proved" or holds(outcome.text, at), (outcome, known, at)
    return done


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda c: f"{c.kernel}-{len(c.predicates)}")
def test_outcomes_agree_with_brute_force(contract: Contract) -> None:
    rng = random.Random(3)
    assert sum(compare(contract, rng, 5) for _ in range(20)) > 20


@pytest.mark.slow
def test_a_hundred_thousand_assignments_across_all_kernels() -> None:
    rng = random.Random(11)
    total = 0
    for contract in itertools.cycle(CONTRACTS):
        total += compare(contract, rng, 100)
        if total > 100_000:
            break


def runs(kernel: Kernel, rng: random.Random) -> bool:
    """One launch on random sizes around the boundaries; False where the contract does not hold."""
    bf16 = rng.random() < 0.8
    known = {
        "T": rng.choice([0, 1, 5, 130]),
        "K": rng.choice([1, 2]),
        "E": rng.choice([2, 3, 5]),
        "S": 0,
        "H": rng.choice([8, 60, 64, 128, 130, 192, 256]),
        "D": rng.choice([8, 31, 64, 96, 128, 200, 256, 512]),
        "dtype": "bfloat16" if bf16 else "float32",
        "weight_format": "bfloat16" if bf16 else "float32",
        "activation": rng.choice(["swiglu", "relu2", "swiglu_oai"]),
        "clamp": rng.choice([None, "pre", "post"]),
        "columns": "concat",
        "bias": rng.random() < 0.3,
        "ep_size": 1,
        "a2a": "local",
        "N": Derived("max(128, align(T, 128))"),
        "G": Derived("D // 128"),
        "target": kernel.contract.targets[-1 if "cpu" in kernel.contract.targets else 0],
        "limit": 7.0,
        "isa": _isa(),
        "E_total": 8,
        "precision": kernel.contract.precisions[0],
    }
    if kernel.contract.evaluate(known).status != "proved":
        return False
    clamp = known["clamp"] if known["activation"] == "swiglu" else "pre" if known["activation"] == "swiglu_oai" else None
    act = Activation(known["activation"], "concat", 7.0 if clamp else None, clamp, 1.7 if known["activation"] == "swiglu_oai" else 1.0)
    dtype = torch.bfloat16 if bf16 else torch.float32
    tokens, hidden, width, experts = known["T"], known["H"], known["D"], known["E"]
    x = torch.randn(tokens, hidden).to(dtype)
    rows = 2 * width if act.gated else width
    w13, w2 = (torch.randn(experts, rows, hidden) * hidden**-0.5).to(dtype), (torch.randn(experts, hidden, width) * width**-0.5).to(dtype)
    b13, b2 = (torch.randn(experts, rows).to(dtype), torch.randn(experts, hidden).to(dtype)) if known["bias"] else (None, None)
    ids = torch.rand(tokens, experts).topk(known["K"]).indices
    weights = torch.rand(tokens, known["K"])
    packed = kernel.pack(w13, b13, w2, b2, act.encode())
    got = kernel.op(x, ids, weights, *packed, act.encode())
    want = kernel.reference(x, ids, weights, *packed, act.encode())
    assert got.shape == x.shape and got.dtype == dtype and bool(got.isfinite().all())
    if tokens:
        assert (got.float() - want.float()).abs().max() <= 0.03 * want.float().abs().max() + 1e-5, (kernel.name, known)
    return True


def _isa() -> str | None:
    return build.isa()


@pytest.mark.parametrize("name", [k.name for k in KERNELS])
def test_a_launch_succeeds_whenever_the_contract_holds(name: str) -> None:
    rng = random.Random(5)
    torch.manual_seed(0)
    assert sum(itertools.islice((1 for _ in range(4000) if runs(by_name(name), rng)), 4)) == 4


def test_an_opaque_activation_has_no_formula_a_kernel_could_run() -> None:
    """The one predicate that is fp8_fallback's own."""
    kernel = by_name("fp8_fallback")
    act = Activation("opaque").encode()
    packed = kernel.pack(torch.randn(2, 8, 8), None, torch.randn(2, 8, 4), None, act)
    with pytest.raises(ValueError, match="opaque"):
        kernel.op(torch.randn(3, 8), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1), *packed, act)
