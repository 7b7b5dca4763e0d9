"""What people do with a model after it was optimised."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path

import moe_blocks as blocks
import pytest
import torch
from torch import nn

import moefx
from moefx.swap import invalidate, swapped


@pytest.fixture
def block() -> nn.Module:
    torch.manual_seed(0)
    return blocks.GatedShared().eval()


def same(a: nn.Module, b: nn.Module, x: torch.Tensor | None = None) -> None:
    x = torch.randn(2, 7, blocks.H) if x is None else x
    with torch.no_grad():
        torch.testing.assert_close(a(x), b(x), atol=2e-5, rtol=0)


def test_parameters_are_shared_and_named_as_before(block: nn.Module) -> None:
    result = moefx.optimize(block)
    assert type(result) is type(block)
    assert list(result.state_dict()) == list(block.state_dict())
    assert all(a is b for a, b in zip(result.parameters(), block.parameters(), strict=True))
    assert moefx.report(result).layers[0]["packed_bytes"] > 0


def test_inplace_changes_the_model_itself(block: nn.Module) -> None:
    plain = copy.deepcopy(block)
    assert moefx.optimize(block, inplace=True) is block
    assert swapped(block)
    same(block, plain)


def test_packs_follow_the_weights(block: nn.Module) -> None:
    """In-place changes, load_state_dict and assignment are seen at the next call."""
    result = moefx.optimize(block)
    same(result, block)
    with torch.no_grad():
        block.w13.mul_(2)
        block.shared_expert.up_proj.weight.add_(0.5)
    same(result, block)
    block.load_state_dict({k: torch.randn_like(v) * 0.2 for k, v in block.state_dict().items()})
    same(result, block)
    block.w2.data = block.w2.data.clone() * 3
    same(result, block)
    result.load_state_dict({k: torch.randn_like(v) * 0.2 for k, v in block.state_dict().items()}, assign=True)
    fresh = blocks.GatedShared().eval()
    fresh.load_state_dict(result.state_dict())
    same(result, fresh)


def test_invalidate_after_a_write_torch_does_not_count(block: nn.Module) -> None:
    result = moefx.optimize(block)
    same(result, block)
    block.w13.detach().numpy()[:] *= 2
    invalidate(result)
    same(result, block)


def test_deepcopy_and_pickle(block: nn.Module, tmp_path: Path) -> None:
    result = moefx.optimize(block)
    copied = copy.deepcopy(result)
    loaded = pickle.loads(pickle.dumps(result))
    torch.save(result, tmp_path / "model.pt")
    saved = torch.load(tmp_path / "model.pt", weights_only=False)
    with torch.no_grad():
        block.w13.mul_(2)
    plain = blocks.GatedShared().eval()
    plain.load_state_dict(copied.state_dict())
    for other in (copied, loaded, saved):
        assert swapped(other)
        same(other, plain)
    same(result, block)


def test_to_another_dtype_runs_as_it_was_and_says_so(block: nn.Module) -> None:
    result = moefx.optimize(block)
    result.to(torch.float64)
    plain = copy.deepcopy(block).double()
    x = torch.randn(2, 7, blocks.H, dtype=torch.float64)
    with pytest.warns(UserWarning, match="ran as it was"), torch.no_grad():
        torch.testing.assert_close(result(x), plain(x))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        result(x)


def test_another_rank_runs_as_it_was(block: nn.Module) -> None:
    result = moefx.optimize(blocks.Gathered().eval())
    x = torch.randn(7, blocks.H)
    with pytest.warns(UserWarning, match="rank 3"), torch.no_grad():
        assert result(x).shape == x.shape


def test_gradients_flow_through_the_block_as_it_was(block: nn.Module) -> None:
    result = moefx.optimize(block)
    x = torch.randn(2, 7, blocks.H, requires_grad=True)
    with pytest.warns(UserWarning, match="gradients are on"):
        result(x).sum().backward()
    want = torch.autograd.grad(block(x).sum(), x)[0]
    torch.testing.assert_close(x.grad, want)


def test_hooks_on_the_block_still_run(block: nn.Module) -> None:
    result = moefx.optimize(block)
    seen = []
    result.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    same(result, block)
    assert seen == [(2, 7, blocks.H)]


def test_inference_mode_and_compile(block: nn.Module) -> None:
    result = moefx.optimize(block)
    x = torch.randn(2, 7, blocks.H)
    with torch.no_grad():
        want = block(x)
    with torch.inference_mode():
        torch.testing.assert_close(result(x), want, atol=2e-5, rtol=0)
    compiled = torch.compile(result, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), want, atol=2e-5, rtol=0)


def test_save_pretrained(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tiny_models import build

    model = build("qwen3_moe")
    result = moefx.optimize(model)
    result.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), model.state_dict().values(), strict=True))


def test_example_inputs_reach_blocks_that_cannot_be_guessed() -> None:
    class Picky(blocks.Gathered):
        def forward(self, hidden: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(hidden) * scale

    model = Picky().eval()
    left = moefx.report(moefx.optimize(model)).layers[0]
    assert not left["rewritten"] and "'scale'" in left["reason"]
    x, scale = torch.randn(2, 7, blocks.H), torch.rand(2, 7, 1)
    result = moefx.optimize(model, (x, scale))
    assert moefx.report(result).layers[0]["rewritten"], moefx.report(result).layers[0]["reason"]
    with torch.no_grad():
        torch.testing.assert_close(result(x[:, :3], scale[:, :3]), model(x[:, :3], scale[:, :3]), atol=2e-5, rtol=0)


def test_keyword_only_arguments() -> None:
    class Keyword(blocks.Loop):
        def forward(self, hidden: torch.Tensor, *, scale: float = 2.0) -> torch.Tensor:  # type: ignore[override]
            return super().forward(hidden) * scale

    model = Keyword().eval()
    result = moefx.optimize(model)
    assert moefx.report(result).layers[0]["rewritten"], moefx.report(result).layers[0]["reason"]
    same(result, model)
    x = torch.randn(1, 3, blocks.H)
    with torch.no_grad(), pytest.warns(UserWarning, match="'scale' differs"):
        torch.testing.assert_close(result(x, scale=3.0), model(x, scale=3.0), atol=2e-5, rtol=0)


def test_hooks_that_transformers_leaves_on_a_router_do_not_switch_the_rewrite_off() -> None:
    pytest.importorskip("transformers")
    from tiny_models import build

    result = moefx.optimize(build("qwen2_moe"))
    ids = torch.randint(0, 256, (2, 5))
    with torch.no_grad():
        result(ids, output_hidden_states=True, output_router_logits=True)
    before = [dict(f.calls_left_alone) for _, f in swapped(result)]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        result(ids)
    assert [f.calls_left_alone for _, f in swapped(result)] == before


def test_hooks_on_submodules_are_called(block: nn.Module) -> None:
    """Set after optimize: the block runs as it was, with a warning. Set before: it is left alone, with a reason."""
    result = moefx.optimize(block)
    seen = []
    handle = result.router.register_forward_hook(lambda *_: seen.append(1))
    with pytest.warns(UserWarning, match="hooks"):
        same(result, result)
    assert seen
    layer = moefx.report(moefx.optimize(copy.deepcopy(block))).layers[0]
    assert layer["rewritten"]
    handle.remove()
    block.router.register_forward_hook(lambda *_: None)
    layer = moefx.report(moefx.optimize(block)).layers[0]
    assert not layer["rewritten"] and "hooks" in layer["reason"]
