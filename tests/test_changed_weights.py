"""Weights that change, go or are differentiated after a block was rewritten: the numbers are always those of the block as it is."""

from __future__ import annotations

import inspect

import moe_blocks as blocks
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import moefx


@pytest.fixture
def block() -> nn.Module:
    torch.manual_seed(0)
    return blocks.GatedShared().eval()


class Residual(nn.Module):
    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.moe(x)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("fused", [True, False])
def test_packs_follow_an_optimizer(block: nn.Module, optimizer: type, fused: bool) -> None:
    fast = moefx.optimize(block)
    x = torch.randn(1, 5, blocks.H)
    step = optimizer(block.parameters(), lr=0.1, fused=fused)
    block(x).square().sum().backward()
    with torch.no_grad():
        before = fast(x)
        step.step()
        torch.testing.assert_close(fast(x), block(x), atol=2e-5, rtol=0)
        assert (fast(x) - before).abs().max() > 0.01


def test_gradients_through_a_compiled_model_are_those_of_the_block(block: nn.Module) -> None:
    model = Residual(block).eval().requires_grad_(False)
    fast = moefx.optimize(model)
    x = torch.randn(1, 5, blocks.H, requires_grad=True)

    def gradient(f) -> torch.Tensor:
        return torch.autograd.grad(f(x).square().sum(), x)[0]

    with pytest.warns(UserWarning, match="no backward"):
        torch.testing.assert_close(gradient(torch.compile(fast, backend="aot_eager")), gradient(model))


def test_the_backend_leaves_frozen_experts_alone_when_the_input_wants_gradients() -> None:
    pytest.importorskip("transformers")
    from tiny_models import build

    model = build("qwen3_moe").requires_grad_(False)
    embedded = model.get_input_embeddings()(torch.arange(5)[None]).requires_grad_()

    def gradient(f) -> torch.Tensor:
        return torch.autograd.grad(f(inputs_embeds=embedded).logits.square().sum(), embedded)[0]

    torch.testing.assert_close(gradient(torch.compile(model, backend="moefx")), gradient(model), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("transform", ["jvp", "vmap", "dual"])
def test_transforms_run_the_block_as_it_was(block: nn.Module, transform: str) -> None:
    model = Residual(block).eval().requires_grad_(False)
    fast, x = moefx.optimize(model), torch.randn(1, 5, blocks.H)

    def run(f) -> torch.Tensor:
        with torch.no_grad():
            if transform == "jvp":
                return torch.func.jvp(f, (x,), (torch.ones_like(x),))[1]
            if transform == "vmap":
                return torch.func.vmap(f, randomness="error")(x.expand(1, *x.shape))
        with torch.autograd.forward_ad.dual_level():
            return torch.autograd.forward_ad.unpack_dual(f(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))).tangent

    try:
        want = run(model)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            run(fast)
        return
    torch.testing.assert_close(run(fast), want)


@pytest.mark.parametrize("change", ["prune", "parametrize", "tensor"])
def test_a_weight_that_is_no_parameter_any_more(block: nn.Module, change: str) -> None:
    fast, x = moefx.optimize(block), torch.randn(1, 3, blocks.H)
    if change == "prune":
        prune.l1_unstructured(fast.router, "weight", amount=0.5)
    if change == "parametrize":
        parametrizations.weight_norm(fast.router, "weight")
    if change == "tensor":
        value = 2 * fast.w13.detach()
        del fast.w13
        fast.w13 = value
    with torch.no_grad(), pytest.warns(UserWarning, match="ran as it was"):
        got = fast(x)
    torch.testing.assert_close(got, type(block).forward(fast, x).detach())


def test_calls_are_those_of_the_class(block: nn.Module) -> None:
    fast, x = moefx.optimize(block), torch.randn(1, 3, blocks.H)
    assert inspect.signature(fast.forward) == inspect.signature(block.forward)
    with torch.no_grad(), pytest.raises(TypeError), pytest.warns(UserWarning):
        fast(x, **{next(iter(inspect.signature(block.forward).parameters)): x})


def test_optimize_leaves_the_random_numbers_alone(block: nn.Module) -> None:
    before = torch.get_rng_state()
    moefx.optimize(block)
    assert torch.equal(torch.get_rng_state(), before)
