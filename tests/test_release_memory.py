"""Peak memory of `inplace=True`: one layer above the final size, counted in bytes that the allocator of torch hands out."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import moe_blocks as blocks
import pytest
import torch
from torch import nn

import moefx

H, D, E, LAYERS = 512, 512, 16, 2


class Alone(blocks.Grouped):
    experts_count, hidden, width = E, H, D


class WithShared(Alone):
    def __init__(self) -> None:
        super().__init__()
        self.shared_expert = blocks.Mlp(D)
        for name, sizes in (("gate_proj", (H, D)), ("up_proj", (H, D)), ("down_proj", (D, H))):
            setattr(self.shared_expert, name, nn.Linear(*sizes, bias=False))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) + self.shared_expert(hidden)


def peak_and_final(build: Callable[[], nn.Module], optimize: Callable[[nn.Module], object]) -> tuple[int, int]:
    """The most bytes of tensors alive at once while `optimize` runs, and those alive after it.

    Both in one profile, after what earlier tests left was collected: it sees the release of tensors that any profile saw allocated.
    """
    gc.collect()
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        model = build()
        with torch.autograd.profiler.record_function("optimize"):
            optimize(model)
        gc.collect()
    events = sorted(profile.kineto_results.events(), key=lambda e: e.start_ns())
    begin = next(e.start_ns() for e in events if e.name() == "optimize")
    live = peak = 0
    for event in events:
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live) if event.start_ns() > begin else peak
    return peak, live


@pytest.mark.parametrize(
    ("kind", "disable", "placement"), [(Alone, (), None), (WithShared, "fuse_shared_expert", "unfused"), (WithShared, (), "fused")]
)
def test_at_most_one_layer_above_the_final_size(kind: type[nn.Module], disable: str | tuple[str, ...], placement: str | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential()

    def build() -> nn.Module:
        return model.extend([kind().to(torch.bfloat16) for _ in range(LAYERS)]).eval()

    peak, final = peak_and_final(build, lambda m: moefx.optimize(m, inplace=True, disable=disable))
    layers = moefx.report(model).layers
    assert [j["experts"]["kernel"] for j in layers] == ["cpu_packed"] * LAYERS
    assert all(j["shared_expert"].get("placement") == placement for j in layers)
    layer = sum(p.numel() * p.element_size() for p in model[0].parameters())
    expert = 3 * H * D * 2
    assert final == pytest.approx(LAYERS * layer, rel=0.01)
    assert peak - final <= layer + 3 * expert  # one is unpacked for comparison at a time, and the shared one's parts are joined beside


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_a_pack_that_rounds_keeps_the_parameters_and_the_report_says_how_much(precision: str) -> None:
    block = blocks.Gathered().to(torch.bfloat16).eval()
    plain = copy.deepcopy(block)
    result = moefx.optimize(block, inplace=True, precision=precision)
    found = moefx.report(result).layers[0]
    kernel = found["experts"]["kernel"]
    if kernel not in ("cpu_fp8", "cpu_int8"):
        pytest.skip(f"no packed kernel of {precision} on this CPU: {kernel}")
    weights = block.w13.nbytes + block.w2.nbytes
    why = f"{kernel} rounds them, so their values can't be made again"
    assert (found["freed_bytes"], found["kept_bytes"], found["kept_because"]) == (0, weights, why)
    assert f"freed nothing of {weights / 2**20:.1f} MiB of parameters beside repacked weights: {why}" in moefx.report(result).to_text(400)
    assert all(torch.equal(result.state_dict()[n], t) for n, t in plain.state_dict().items())
    assert moefx.report(moefx.optimize(plain, precision=precision)).layers[0]["kept_bytes"] == 0


def test_tied_weights_are_kept_and_the_report_says_so() -> None:
    model = nn.Sequential(blocks.Gathered(), blocks.Gathered()).eval()
    model[1].w2 = model[0].w2
    layers = moefx.report(moefx.optimize(model, inplace=True)).layers
    assert [j["kept_bytes"] for j in layers] == [model[0].w13.nbytes + model[0].w2.nbytes] * 2
    assert layers[0]["kept_because"] == "something besides the pack reads them"
