"""`inplace=True` in odd surroundings: inference mode, interrupts, conversions, parts of a block, threads. Nothing is lost."""

from __future__ import annotations

import copy
import sys
import threading
from pathlib import Path

import moe_blocks as blocks
import pytest
import torch
from torch import nn

import moefx
from moefx import pipeline, swap


class Inner(nn.Module):
    """A router beside the experts' own module."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(blocks.H, 6)
        self.experts = Experts()

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(h).softmax(-1).topk(2)
        return self.experts(h, ids, weights)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.randn(6, 32, blocks.H) * 0.2)
        self.w2 = nn.Parameter(torch.randn(6, blocks.H, 16) * 0.2)

    def forward(self, h: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(h)
        for e in range(6):
            token, slot = torch.where(ids == e)
            gate, up = (h[token] @ self.w13[e].t()).chunk(2, -1)
            out.index_add_(0, token, (nn.functional.silu(gate) * up) @ self.w2[e].t() * weights[token, slot, None])
        return out


@pytest.fixture
def inner() -> nn.Module:
    torch.manual_seed(0)
    return Inner().eval()


@pytest.fixture
def two() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(blocks.GatedShared(), blocks.GatedShared()).eval()


def outputs(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(x)


def freed(model: nn.Module) -> int:
    return sum(p.is_meta for p in model.parameters())


def test_optimize_under_inference_mode(two: nn.Module) -> None:
    x = torch.randn(1, 3, blocks.H)
    want, before = outputs(two, x), copy.deepcopy(two.state_dict())
    with torch.inference_mode():
        moefx.optimize(two, inplace=True)
    assert freed(two) > 0
    torch.testing.assert_close(outputs(two, x), want, atol=2e-5, rtol=0)
    assert all(torch.equal(v, before[k]) for k, v in two.state_dict().items())


def test_a_call_as_it_was_under_inference_mode_leaves_ordinary_parameters(two: nn.Module) -> None:
    state = copy.deepcopy(two.state_dict())
    moefx.optimize(two, inplace=True)
    with torch.inference_mode(), pytest.warns(UserWarning, match="ran as it was"):
        two[0](torch.randn(3, blocks.H))
    assert not any(p.is_inference() for p in two.parameters())
    two.load_state_dict(state)
    pack = two[0].forward.pack
    with torch.inference_mode():
        two[0](torch.randn(1, 3, blocks.H))
        assert pack() is pack()  # kept, not made anew for each call


@pytest.mark.parametrize("after", [0, 1])
def test_an_interrupt_gives_the_model_back(two: nn.Module, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    x = torch.randn(1, 3, blocks.H)
    want, parameters = outputs(two, x), dict(two.named_parameters())
    real, calls = pipeline._release, []

    def interrupted(*arguments) -> None:
        real(*arguments)
        calls.append(arguments)
        if len(calls) > after:
            raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "_release", interrupted)
    with pytest.raises(KeyboardInterrupt):
        moefx.optimize(two, inplace=True)
    assert not swap.swapped(two) and freed(two) == 0
    assert torch.equal(outputs(two, x), want)
    assert {n: p.shape for n, p in two.named_parameters()} == {n: p.shape for n, p in parameters.items()}
    assert not any(m._state_dict_hooks or m._load_state_dict_pre_hooks or "_apply" in m.__dict__ for m in two.modules())
    monkeypatch.undo()
    torch.testing.assert_close(outputs(moefx.optimize(two, inplace=True), x), want, atol=2e-5, rtol=0)


def test_conversions_are_those_of_the_weights(two: nn.Module) -> None:
    x = torch.randn(1, 3, blocks.H)
    plain = copy.deepcopy(two).bfloat16().float()
    moefx.optimize(two, inplace=True)
    two.to("cpu").bfloat16()
    assert {v.dtype for v in two.state_dict().values()} == {torch.bfloat16}
    two.float()
    torch.testing.assert_close(outputs(two, x), outputs(plain, x), atol=2e-5, rtol=0)


@pytest.mark.parametrize("path", ["experts", ""])
def test_parts_of_a_block_are_saved_and_loaded(inner: nn.Module, path: str, tmp_path: Path) -> None:
    state = copy.deepcopy(inner.state_dict())
    moefx.optimize(inner, inplace=True)
    assert freed(inner) == 2
    part = inner.get_submodule(path)
    prefix = f"{path}." if path else ""
    assert all(torch.equal(v, state[prefix + n]) for n, v in part.state_dict().items())
    doubled = {n: 2 * v for n, v in part.state_dict().items()}
    part.load_state_dict(doubled)
    assert all(torch.equal(v, doubled[n]) for n, v in part.state_dict().items())
    plain = Inner().eval()
    plain.load_state_dict(inner.state_dict())
    x = torch.randn(5, blocks.H)
    torch.testing.assert_close(outputs(inner, x), outputs(plain, x), atol=2e-5, rtol=0)


def test_threads_may_call_while_weights_come_back(two: nn.Module) -> None:
    model = moefx.optimize(two, inplace=True)
    x, failed = torch.randn(1, 5, blocks.H), []

    def call(one: nn.Module) -> None:
        try:
            outputs(one, x[0])  # a rank that was not traced: runs as it was
        except Exception as error:  # noqa: BLE001  whatever it is fails the test
            failed.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(60):
            one = copy.deepcopy(model)
            threads = [threading.Thread(target=call, args=(one,)) for _ in range(4)]
            [t.start() for t in threads]
            [t.join() for t in threads]
    finally:
        sys.setswitchinterval(interval)
    assert failed == []
