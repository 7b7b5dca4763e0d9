"""The activation by algebra: spellings of every named variant are recognised with exact constants, near misses are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from moefx.activation.recognise import Recognised, Refused, fingerprint, recognise
from moefx.activation.spec import COLUMNS, Activation
from moefx.capture import capture

D = 6
Form = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def trace(
    function: Callable[[torch.Tensor], torch.Tensor], width: int = 2 * D, dtype: torch.dtype = torch.float32
) -> tuple[fx.Node, fx.Node]:
    """(output node, leaf) of `function` on [T, width] rows, in the ATen form of a captured block."""

    class Module(nn.Module):
        def forward(self, h: torch.Tensor) -> torch.Tensor:
            return function(h)

    graph = capture(Module(), (torch.randn(7, width, dtype=dtype),), {}).graph.graph
    leaf = [n for n in graph.nodes if n.op == "placeholder"][-1]
    return next(n for n in graph.nodes if n.op == "output").args[0][0], leaf


def read(function: Callable[[torch.Tensor], torch.Tensor], width: int = 2 * D, dtype: torch.dtype = torch.float32) -> Recognised | Refused:
    output, leaf = trace(function, width, dtype)
    return recognise(output, [leaf])


def gated(form: Form) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda h: form(*h.chunk(2, -1))


def low(x: torch.Tensor, limit: float) -> torch.Tensor:
    return torch.clamp(x, -limit, limit)


SWIGLU: list[Form] = [
    lambda g, u: F.silu(g) * u,
    lambda g, u: u * F.silu(g),
    lambda g, u: g * torch.sigmoid(g) * u,
    lambda g, u: u * (torch.sigmoid(g) * g),
    lambda g, u: g / (1 + torch.exp(-g)) * u,
    lambda g, u: u * g / (torch.exp(-g) + 1.0),
    lambda g, u: g * torch.reciprocal(1 + torch.exp(-g)) * u,
    lambda g, u: 0.5 * g * (1 + torch.tanh(0.5 * g)) * u,
    lambda g, u: (F.silu(g.double()) * u).float(),
    lambda g, u: (g * u) * torch.sigmoid(g),
    lambda g, u: g * (1 - torch.sigmoid(-g)) * u,
    lambda g, u: F.silu(g) * u * 1.0 + 0.0,
]
PRE: list[Form] = [
    lambda g, u: F.silu(g.clamp(max=7.0)) * u.clamp(-7.0, 7.0),
    lambda g, u: F.silu(torch.minimum(g, torch.tensor(7.0))) * torch.clamp(u, min=-7, max=7),
    lambda g, u: F.silu(torch.where(g > 7.0, 7.0, g)) * low(u, 7.0),
    lambda g, u: F.silu(g - F.relu(g - 7.0)) * torch.clamp(torch.clamp(u, max=7.0), min=-7.0),
    lambda g, u: torch.clamp_max(g, 7.0) * torch.sigmoid(torch.clamp_max(g, 7.0)) * F.hardtanh(u, -7.0, 7.0),
    lambda g, u: low(u, 7.0) * F.silu(-torch.maximum(-g, torch.tensor(-7.0))),
    lambda g, u: F.silu(torch.clamp(2 * g, max=14.0) / 2) * torch.where(u < -7.0, -7.0, torch.where(u > 7.0, 7.0, u)),
]
POST: list[Form] = [
    lambda g, u: F.silu(g).clamp(max=7.0) * u.clamp(-7.0, 7.0),
    lambda g, u: torch.minimum(g * torch.sigmoid(g), torch.tensor(7.0)) * low(u, 7.0),
]
OAI: list[Form] = [
    lambda g, u: (low(u, 7.0) + 1) * (g.clamp(max=7.0) * torch.sigmoid(g.clamp(max=7.0) * 1.702)),
    lambda g, u: g.clamp(max=7.0) / (1 + torch.exp(-1.702 * g.clamp(max=7.0))) * (1 + low(u, 7.0)),
]
GEGLU: list[Form] = [
    lambda g, u: F.gelu(g) * u,
    lambda g, u: 0.5 * g * (1 + torch.erf(g / 2**0.5)) * u,
    lambda g, u: g * 0.5 * (1.0 + torch.erf(g * 0.7071067811865476)) * u,
]
GEGLU_TANH: list[Form] = [
    lambda g, u: F.gelu(g, approximate="tanh") * u,
    lambda g, u: u * 0.5 * g * (1 + torch.tanh(0.7978845608028654 * (g + 0.044715 * g**3))),
]
KINDS = [
    *[(f, Activation("swiglu")) for f in SWIGLU],
    *[(f, Activation("swiglu", limit=7.0, clamp="pre")) for f in PRE],
    *[(f, Activation("swiglu", limit=7.0, clamp="post")) for f in POST],
    *[(f, Activation("swiglu_oai", limit=7.0, clamp="pre", alpha=1.702, beta=1.0)) for f in OAI],
    *[(f, Activation("geglu")) for f in GEGLU],
    *[(f, Activation("geglu_tanh")) for f in GEGLU_TANH],
]


@pytest.mark.parametrize(("form", "want"), KINDS, ids=[f"{a.kind}-{a.clamp}-{i}" for i, (_, a) in enumerate(KINDS)])
def test_spellings(form: Form, want: Activation) -> None:
    found = read(gated(form))
    assert isinstance(found, Recognised), found
    assert found.activation == want


SPLITS: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "concat": lambda h: (h[..., :D], h[..., D:]),
    "concat_up_first": lambda h: h.split(D, -1)[::-1],
    "interleaved": lambda h: (h[..., ::2], h[..., 1::2]),
    "interleaved_up_first": lambda h: h.unflatten(-1, (D, 2)).flip(-1).unbind(-1),
}


@pytest.mark.parametrize("columns", SPLITS)
def test_column_orders(columns: str) -> None:
    found = read(lambda h: F.silu(SPLITS[columns](h)[0]) * SPLITS[columns](h)[1])
    assert isinstance(found, Recognised), found
    assert found.activation == Activation("swiglu", columns)
    h = torch.randn(5, 2 * D)
    gate, up = SPLITS[columns](h)
    torch.testing.assert_close(found.activation(h), F.silu(gate) * up)


@pytest.mark.parametrize(
    ("function", "kind"), [(lambda h: F.relu(h) ** 2, "relu2"), (lambda h: torch.square(h.clamp(min=0)), "relu2"), (F.silu, "silu")]
)
def test_without_a_gate(function: Callable[[torch.Tensor], torch.Tensor], kind: str) -> None:
    found = read(function, D)
    assert isinstance(found, Recognised) and found.activation.kind == kind


NEGATIVES: list[Form] = [
    lambda g, u: F.silu(g.clamp(max=7.0)) * u.clamp(-7.0, 6.0),
    lambda g, u: F.silu(g.clamp(max=7.0)) * u.clamp(-8.0, 8.0),
    lambda g, u: F.silu(g.clamp(max=7.0)) * u,
    lambda g, u: F.silu(g) * u.clamp(-7.0, 7.0),
    lambda g, u: F.silu(g.clamp(-7.0, 7.0)) * u.clamp(-7.0, 7.0),
    lambda g, u: F.silu(torch.where(g < 7.0, g, 7.0)) * u.clamp(-7.0, 7.0),
    lambda g, u: g * torch.sigmoid(1.702 * g) * u,
    lambda g, u: F.silu(g) * u * 1.0001,
    lambda g, u: F.silu(g) + u,
    lambda g, u: F.silu(g) * u + 1e-3,
    lambda g, u: F.silu(g) * u / u * u,
    lambda g, u: torch.sigmoid(g) * u,
    lambda g, u: F.relu(g) * u,
    lambda g, u: torch.tanh(g) * u,
    lambda g, u: F.silu(g) * u.abs(),
    lambda g, u: F.silu(g) * torch.softmax(u, -1),
    lambda g, u: 0.5 * g * (1 + torch.erf(g * 0.7072)) * u,
    lambda g, u: u * 0.5 * g * (1 + torch.tanh(0.7978845608028654 * (g + 0.0448 * g**3))),
    lambda g, u: g * torch.exp(g) / (1 + torch.exp(g)) * u,
    lambda g, u: F.silu(g) * u.flip(-1),
    lambda g, u: F.silu(g.clamp(min=7.0)) * u.clamp(-7.0, 7.0),
    lambda g, u: F.silu(g) * u * torch.linspace(1.0, 2.0, D),
    lambda g, u: (F.silu(g) * u).to(torch.float8_e4m3fn).float(),
    lambda g, u: (F.silu(g) * u).round(),
]


@pytest.mark.parametrize("form", NEGATIVES, ids=range(len(NEGATIVES)))
def test_near_misses(form: Form) -> None:
    found = read(gated(form))
    assert isinstance(found, Refused) and found.reason


def test_separate_products_find_their_gate() -> None:
    class Module(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a * F.silu(b)

    program = torch.export.export(Module(), (torch.randn(7, D), torch.randn(7, D)), strict=False).run_decompositions({})
    graph = program.graph_module.graph
    up, gate = [n for n in graph.nodes if n.op == "placeholder"]
    found = recognise(next(n for n in graph.nodes if n.op == "output").args[0][0], [up, gate])
    assert isinstance(found, Recognised)
    assert found.leaves == (gate, up) and found.activation == Activation("swiglu", "separate")


def test_rounding_is_recorded() -> None:
    found = read(gated(SWIGLU[0]), dtype=torch.bfloat16)
    assert isinstance(found, Recognised) and "bfloat16" in found.rounding
    exact = read(gated(SWIGLU[0]))
    assert isinstance(exact, Recognised) and exact.rounding == "exact"


@settings(max_examples=15, deadline=None)
@given(limit=st.floats(0.01, 100), alpha=st.floats(1.01, 3), beta=st.floats(-2, 2), columns=st.sampled_from(COLUMNS[:4]))
def test_constants_are_exact(limit: float, alpha: float, beta: float, columns: str) -> None:
    """Whatever the numbers in the model, they come back bit for bit, and the named formula computes what the model does."""
    want = Activation("swiglu_oai", columns, limit, "pre", alpha, beta)
    found = read(want)
    assert isinstance(found, Recognised) and found.activation == want
    other = read(lambda h: Activation("swiglu_oai", columns, limit * 1.001, "pre", alpha, beta)(h))
    assert isinstance(other, Recognised) and other.activation != want


def test_encoding_round_trip() -> None:
    for _, activation in KINDS:
        assert Activation.decode(activation.encode()) == activation
    with pytest.raises(ValueError, match="swish"):
        Activation("swish")
    with pytest.raises(ValueError, match="diagonal"):
        Activation("swiglu", "diagonal")


@pytest.mark.parametrize(
    ("kind", "named", "message"),
    [
        ("swiglu_oai", {"limit": 7.0, "clamp": "post"}, "'post' of swiglu_oai is unknown; choose None or one of pre"),
        ("swiglu", {"limit": 7.0, "clamp": "both"}, "'both' of swiglu is unknown; choose None or one of pre, post"),
        ("swiglu", {"limit": 7.0}, "clamp None with limit 7.0: give both"),
        ("swiglu", {"clamp": "pre"}, "clamp 'pre' with limit None: give both"),
        ("swiglu", {"alpha": 1.702}, "alpha 1.702 and beta 0 belong to swiglu_oai"),
    ],
)
def test_what_the_formula_would_not_read_is_refused(kind: str, named: dict[str, Any], message: str) -> None:
    """Kernels computed something else with it."""
    with pytest.raises(ValueError, match=message):
        Activation(kind, **named)


def test_fingerprints() -> None:
    def of(form: Form) -> str:
        output, leaf = trace(gated(form))
        return fingerprint(output, [leaf])

    assert of(SWIGLU[0]) == of(lambda g, u: F.silu(g) * u)
    assert len({of(f) for f in (SWIGLU[0], SWIGLU[2], PRE[0], lambda g, u: F.silu(g.clamp(max=7.5)) * u.clamp(-7.0, 7.0))}) == 4
