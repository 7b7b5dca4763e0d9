"""What would be wrong for other weights, calls or tiny terms than those seen when the model was optimised."""

from __future__ import annotations

import copy
import gc
import warnings

import moe_blocks as blocks
import pytest
import torch
import torch.nn.functional as F
from moe_blocks import E, GatedShared, Gathered, H, K, Loop
from torch import nn

import moefx


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


class TwoBanks(Gathered):
    """The second bank of gates only counts once it is trained: today it holds zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.zeros(E, H))

    def experts(self, x, weights, ids):
        flat = ids.reshape(-1)
        y = torch.bmm(self.w13[flat], x.repeat_interleave(K, 0).unsqueeze(-1)).squeeze(-1)
        y = torch.bmm(self.w2[flat], self.act(y).unsqueeze(-1)).squeeze(-1) + self.extra[flat] * 3.0
        return (y.view(-1, K, H) * weights.unsqueeze(-1)).sum(1)


class SwappedIds(Loop):
    """Expert e runs for the tokens of expert E - 1 - e: with equal experts no number shows it."""

    def experts(self, x, weights, ids):
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(ids == E - 1 - e)
            y = F.linear(self.act(F.linear(x[token], self.w13[e])), self.w2[e])
            out = out.index_add(0, token, y * weights[token, slot, None])
        return out


class TinyResidual(Gathered):
    def experts(self, x, weights, ids):
        return super().experts(x, weights, ids) + 0.002 * x


class TinyScale(Gathered):
    def experts(self, x, weights, ids):
        flat = ids.reshape(-1)
        y = torch.bmm(self.w13[flat], x.repeat_interleave(K, 0).unsqueeze(-1)).squeeze(-1)
        y = torch.bmm(self.w2[flat], self.act(y).unsqueeze(-1)).squeeze(-1) * 1.003
        return (y.view(-1, K, H) * weights.unsqueeze(-1)).sum(1)


class Capped(Gathered):
    """At most 2,000 tokens are computed; the trial has fewer."""

    def experts(self, x, weights, ids):
        y = super().experts(x, weights, ids)[:2000]
        return F.pad(y, (0, 0, 0, x.shape[0] - y.shape[0]))


class Bounded(Gathered):
    def experts(self, x, weights, ids):
        flat = ids.reshape(-1)
        y = torch.bmm(self.w13[flat], x.repeat_interleave(K, 0).unsqueeze(-1)).squeeze(-1)
        y = torch.bmm(self.w2[flat], self.act(y).unsqueeze(-1)).squeeze(-1).clamp(-1e4, 1e4)
        return (y.view(-1, K, H) * weights.unsqueeze(-1)).sum(1)


def worst(a: nn.Module, b: nn.Module, *inputs: torch.Tensor) -> float:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return (a(*inputs).double() - b(*inputs).double()).abs().max().item()


@pytest.mark.parametrize("kind", [TwoBanks, SwappedIds])
def test_no_proof_by_the_weights_of_today(kind: type[nn.Module]) -> None:
    block = kind().eval()
    with torch.no_grad():  # upcycled: every expert starts from the same values
        block.w13.copy_(block.w13[:1].expand_as(block.w13))
        block.w2.copy_(block.w2[:1].expand_as(block.w2))
    result = moefx.optimize(block)
    with torch.no_grad():
        for p in block.parameters():
            p.copy_(torch.randn_like(p) * p.shape[-1] ** -0.5)
    assert worst(result, block, torch.randn(1, 9, H)) < 1e-5


@pytest.mark.parametrize("kind, reason", [(TinyResidual, None), (TinyScale, "constant")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_terms_below_the_rounding_stay(kind: type[nn.Module], reason: str | None, dtype: torch.dtype) -> None:
    """In fp32 the same formula shows the term: what was rewritten in bf16 must have kept it."""
    block = kind().eval().to(dtype)
    result = moefx.optimize(block)
    layer = moefx.report(result).layers[0]
    assert layer["rewritten"] == (reason is None)
    assert reason is None or reason in layer["reason"]
    wide, x = copy.deepcopy(block).double(), torch.randn(1, 64, H).to(dtype)
    with torch.no_grad():
        lean = result(x).double() - wide(x.double())
    term = 0.002 * x.double()
    along = (lean * term).sum() / (term * term).sum()
    assert kind is TinyScale or abs(along) < 0.5, "the residual was dropped"


@pytest.mark.parametrize("kind, reason", [(Capped, "fixed number of rows"), (Bounded, "clamp compares")])
def test_limits_that_no_trial_reaches_are_left_or_kept(kind: type[nn.Module], reason: str) -> None:
    block = kind().eval()
    result = moefx.optimize(block)
    layer = moefx.report(result).layers[0]
    assert layer["rewritten"] or reason in layer["reason"]
    assert worst(result, block, torch.randn(1, 2200, H)) < 1e-5
    assert worst(result, block, torch.randn(1, 3, H) * 300) < 1e-2


def test_ids_beyond_the_experts_do_not_reach_the_shared_slot() -> None:
    """Some models mark "no expert" by id E; a fused slot has that number."""

    class Marked(GatedShared):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            x = hidden.view(-1, H)
            weights, ids = blocks.route(self.router(x))
            ids = torch.where(weights < 0.45, E, ids)
            return (self.experts(x, weights, ids) + torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)).view(hidden.shape)

        def experts(self, x, weights, ids):
            out = torch.zeros_like(x)
            for e in range(E):
                token, slot = torch.where(ids == e)
                out = out.index_add(0, token, F.linear(self.act(F.linear(x[token], self.w13[e])), self.w2[e]) * weights[token, slot, None])
            return out

    block = Marked().eval()
    result = moefx.optimize(block)
    assert moefx.report(result).layers[0]["shared_expert"]["placement"] == "fused"
    assert worst(result, block, torch.randn(1, 40, H)) < 1e-5


def test_a_pack_is_not_kept_for_another_storage_at_its_address() -> None:
    block = GatedShared().eval()
    result = moefx.optimize(block)
    x = torch.randn(1, 3, H)
    for _ in range(5):
        with torch.no_grad():
            result(x)
            for name, p in list(result.named_parameters()):
                if name in ("w13", "w2"):
                    setattr(result, name, nn.Parameter(torch.randn(p.shape) * p.shape[-1] ** -0.5))
            del p
            gc.collect()
        plain = copy.deepcopy(result)
        plain.__dict__.pop("forward", None)
        assert worst(result, plain, x) < 1e-5


def test_parts_replaced_after_optimize_are_used() -> None:
    block = GatedShared().eval()
    result = moefx.optimize(block)
    result.router = nn.Linear(H, E, bias=False)
    plain = copy.deepcopy(result)
    plain.__dict__.pop("forward", None)
    x = torch.randn(1, 5, H)
    with torch.no_grad(), pytest.warns(UserWarning, match="replaced"):
        torch.testing.assert_close(result(x), plain(x), atol=0, rtol=0)


def test_training_mode_and_autocast_run_the_block_as_it_was() -> None:
    class Noisy(GatedShared):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden) * (2.0 if self.training else 1.0)

    block = Noisy().eval()
    result = moefx.optimize(block)
    x = torch.randn(1, 4, H)
    with torch.no_grad():
        with pytest.warns(UserWarning, match="training"):
            torch.testing.assert_close(result.train()(x), block.train()(x))
        result.eval(), block.eval()
        with torch.autocast("cpu", torch.bfloat16), pytest.warns(UserWarning, match="autocast"):
            assert torch.equal(result(x), block(x))


def test_ties_are_part_of_what_a_trace_assumes() -> None:
    """Two alike blocks, one with expert weights tied: a trace of one says nothing of the other."""
    first, second = GatedShared().eval(), GatedShared().eval()
    second.shared_expert.up_proj.weight = second.shared_expert.gate_proj.weight
    model = nn.Sequential(first, second).eval()
    result = moefx.optimize(model)
    assert worst(result, model, torch.randn(1, 6, H)) < 1e-5


def test_strict_and_inplace_leave_the_model_as_it_was() -> None:
    model = nn.Sequential(GatedShared(), TinyScale()).eval()
    plain = copy.deepcopy(model)
    with pytest.raises(moefx.errors.NotRewrittenError):
        moefx.optimize(model, inplace=True, strict=True)
    assert not any("forward" in m.__dict__ for m in model.modules())
    assert worst(model, plain, torch.randn(1, 6, H)) == 0


def test_a_missing_argument_is_the_blocks_own_error() -> None:
    result = moefx.optimize(GatedShared().eval())
    with pytest.raises(TypeError, match="hidden"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result()
