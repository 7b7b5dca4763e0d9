"""`inplace=True` frees what only a pack reads; values, loading and calls as before stay possible."""

from __future__ import annotations

import copy
import pickle
import warnings

import moe_blocks as blocks
import pytest
import torch
from test_no_wrong_rewrite import TinyScale
from torch import nn

import moefx

KINDS = ["Gathered", "GatedShared", "WideShared", "ListLoop", "Oai", "Transposed"]


@pytest.fixture(params=KINDS)
def block(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    return getattr(blocks, request.param)().eval()


def same(a: nn.Module, b: nn.Module) -> None:
    x = torch.randn(1, 9, blocks.H)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(a(x), b(x), atol=2e-5, rtol=0)


@pytest.mark.parametrize("ep_size", [1, 2])
def test_sources_of_the_pack_are_freed_and_state_dict_has_their_values(block: nn.Module, ep_size: int) -> None:
    plain = copy.deepcopy(block)
    result = moefx.optimize(block, inplace=True, ep_size=ep_size)
    found = moefx.report(result).layers[0]
    assert found["experts"]["kernel"] == "cpu_packed"
    meta = [p for p in result.parameters() if p.is_meta]
    assert found["freed_bytes"] == sum(p.numel() * p.element_size() for p in meta) > 0
    same(result, plain)
    state = result.state_dict()
    assert list(state) == list(plain.state_dict())
    assert all(torch.equal(state[n], t) for n, t in plain.state_dict().items())
    for again in (copy.deepcopy(result), pickle.loads(pickle.dumps(result))):
        same(again, plain)
        assert all(torch.equal(again.state_dict()[n], t) for n, t in plain.state_dict().items())


def test_loading_brings_them_back(block: nn.Module) -> None:
    other = copy.deepcopy(block)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.7)
    result = moefx.optimize(block, inplace=True)
    result.load_state_dict(other.state_dict())
    assert not any(p.is_meta for p in result.parameters())
    same(result, other)


def test_an_assigned_parameter_and_another_type_are_seen(block: nn.Module) -> None:
    plain = copy.deepcopy(block)
    result = moefx.optimize(block, inplace=True)
    name, old = next((n, p) for n, p in result.named_parameters() if p.is_meta)
    new = torch.randn(old.shape) * 0.1
    for module in (result, plain):
        path, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(path), leaf, nn.Parameter(new.clone()))
    same(result, plain)
    double = moefx.optimize(copy.deepcopy(plain), inplace=True).double()
    x = torch.randn(1, 4, blocks.H).double()
    with torch.no_grad(), pytest.warns(UserWarning, match="float64|float32"):
        torch.testing.assert_close(double(x), plain.double()(x))


def test_tied_weights_and_the_default_free_nothing() -> None:
    model = nn.Sequential(blocks.Gathered(), blocks.Gathered()).eval()
    model[1].w2 = model[0].w2
    result = moefx.optimize(model, inplace=True)
    assert [layer["freed_bytes"] for layer in moefx.report(result).layers] == [0, 0]
    assert not any(p.is_meta for p in moefx.optimize(blocks.Gathered().eval()).parameters())


def test_strict_gives_the_weights_back() -> None:
    model = nn.Sequential(blocks.Gathered(), TinyScale()).eval()
    plain = copy.deepcopy(model)
    with pytest.raises(moefx.errors.NotRewrittenError):
        moefx.optimize(model, inplace=True, strict=True)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_write_to_a_freed_parameter_is_an_error_not_lost() -> None:
    result = moefx.optimize(blocks.Gathered().eval(), inplace=True)
    with torch.no_grad():
        result.w13.mul_(1.5)
        with pytest.raises(moefx.errors.ParameterFreedError, match=r"w13 was written in place.*restore"):
            result(torch.randn(1, 2, blocks.H))


def test_after_restore_writes_are_seen() -> None:
    block = blocks.GatedShared().eval()
    plain = copy.deepcopy(block)
    result = moefx.optimize(block, inplace=True)
    moefx.swap.restore(result)
    with torch.no_grad():
        for module in (result, plain):
            module.w13.mul_(1.5)
    same(result, plain)
