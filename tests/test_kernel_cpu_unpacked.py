"""The C++ form of the bf16 experts: against float64, independent of threads, and what happens where it can't be built."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from test_kernels_fp8 import exact, weights

from moefx.activation.spec import Activation
from moefx.kernels import grouped_mm
from moefx.kernels.cpu import build, experts_bf16

SIGMOID = [
    Activation("swiglu"),
    Activation("swiglu", "concat_up_first", 0.5, "pre"),
    Activation("swiglu", "interleaved", 0.25, "post"),
    Activation("swiglu_oai", "interleaved_up_first", 0.7, "pre", 1.702, 1.0),
]
needs_library = pytest.mark.skipif(
    build.library("experts_bf16", experts_bf16.ISA) is None, reason=f"not built here: {build.why_not('experts_bf16')}"
)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@needs_library
@pytest.mark.parametrize("tokens", [1, 2, 7, 40])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("act", SIGMOID, ids=lambda a: f"{a.kind}-{a.columns}-{a.clamp}")
def test_against_float64(act: Activation, bias: bool, tokens: int) -> None:
    """No worse than the same experts in torch operations on the same bf16 weights, and close to float64."""
    made = weights(act, experts=5, hidden=96, width=64, bias=bias, dtype=torch.bfloat16)
    x, ids, w = torch.randn(tokens, 96).bfloat16(), torch.rand(tokens, 5).topk(2).indices, torch.rand(tokens, 2)
    assert experts_bf16.takes(x, ids, made[0], made[2], act)
    got = experts_bf16.run(x, ids, w, *made, act, 0).double()
    torch_form = grouped_mm._one_by_one(x, ids, w, *made, act.encode(), 0).double()
    want = exact(x, ids, w, made, act)
    mine, theirs = (got - want).abs().mean(), (torch_form - want).abs().mean()
    assert mine <= 1.1 * theirs + 1e-6
    assert (got - want).abs().max() / want.abs().max() < 2e-2


@needs_library
def test_results_do_not_depend_on_threads() -> None:
    made = weights(SIGMOID[0], hidden=96, width=64, dtype=torch.bfloat16)
    x, ids, w = torch.randn(33, 96).bfloat16(), torch.rand(33, 4).topk(2).indices, torch.rand(33, 2)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results.append(experts_bf16.run(x, ids, w, *made, SIGMOID[0], 0))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(r, results[0]) for r in results)


@needs_library
def test_foreign_ids_nan_and_large_values() -> None:
    made = weights(SIGMOID[0], hidden=96, width=64, dtype=torch.bfloat16)
    x, ids, w = torch.randn(6, 96).bfloat16(), torch.tensor([[0, 9]] * 6), torch.rand(6, 2)
    x[2, 5] = float("nan")
    x[3] *= 1e4
    got = experts_bf16.run(x, ids, w, *made, SIGMOID[0], 0)
    want = exact(x, ids[:, :1], w[:, :1], made, SIGMOID[0])
    assert got[2].isnan().all()
    rest = [0, 1, 3, 4, 5]
    assert ((got[rest].double() - want[rest]).abs().amax(1) / want[rest].abs().amax(1)).max() < 2e-2
    assert (experts_bf16.run(x[rest], torch.full((5, 2), -3), w[rest], *made, SIGMOID[0], 0) == 0).all()


@needs_library
def test_shapes_that_do_not_belong_together_are_refused() -> None:
    act = SIGMOID[0]
    w13, b13, w2, b2 = weights(act, hidden=96, width=64, dtype=torch.bfloat16)
    x, ids, w = torch.randn(6, 96).bfloat16(), torch.rand(6, 4).topk(2).indices, torch.rand(6, 2)
    for wrong in ((x[:3], ids, w), (x, ids, w[:3])):
        with pytest.raises(ValueError, match="are expected.*cut x"):
            experts_bf16.run(*wrong, w13, b13, w2, b2, act, 0)
    for wide, first, second in ((x[:, :64], w13, w2), (x, w13[:3], w2), (x, w13[:, :64], w2)):
        with pytest.raises(ValueError, match=r"w13 \(.*give \[T, H\]"):
            experts_bf16.run(wide, ids, w, first, b13, second, b2, act, 0)


SHORT = """
import resource
import torch
from moefx.activation.spec import Activation
from moefx.kernels.cpu import experts_bf16, limits

torch.set_num_threads(1)
limits.openmp = lambda: 0
tokens, hidden = 20000, 256
w13, w2 = torch.zeros(4, 512, hidden).bfloat16(), torch.zeros(4, hidden, 256).bfloat16()
x, ids, w = torch.zeros(tokens, hidden).bfloat16(), torch.zeros(tokens, 2).long(), torch.ones(tokens, 2)
experts_bf16.run(x[:1], ids[:1], w[:1], w13, None, w2, None, Activation("swiglu"), 0)
limits.flops("fp32")
torch.set_num_threads(4)  # none of them was ever made: their stacks are still to be found
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
shown = set()
for megabytes in range(0, 120, 4):
    resource.setrlimit(resource.RLIMIT_AS, (used + (megabytes << 20), resource.RLIM_INFINITY))
    for call in (lambda: experts_bf16.run(x, ids, w, w13, None, w2, None, Activation("swiglu"), 0), lambda: limits.flops("fp32")):
        try:
            call()
            shown.add("fine")
        except (MemoryError, RuntimeError) as error:
            shown.add(str(error))
print(sorted(shown))
"""


@needs_library
def test_short_memory_is_an_error_not_the_end_of_the_process() -> None:
    """With room for some of the memory, or for some of the threads."""
    done = subprocess.run([sys.executable, "-c", SHORT], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "no memory, or no threads, for the bf16 experts" in done.stdout and "to measure this machine" in done.stdout
    assert "fine" in done.stdout


def test_without_a_compiler_torch_operations_take_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    build.library.cache_clear()
    try:
        assert build.library("experts_bf16", "avx512_bf16") is None
        assert build.why_not("experts_bf16") == "no C++ compiler was found"
        monkeypatch.setattr(build, "cpu_flags", frozenset)
        assert build.library("experts_bf16", "avx2") is None
        assert "this CPU has no avx2" in str(build.why_not("experts_bf16"))
    finally:
        monkeypatch.undo()
        build.library.cache_clear()
    monkeypatch.setattr(build, "library", lambda *_: None)
    made = weights(SIGMOID[0], hidden=96, width=64, dtype=torch.bfloat16)
    x, ids, w = torch.randn(3, 96).bfloat16(), torch.rand(3, 4).topk(2).indices, torch.rand(3, 2)
    got = grouped_mm.KERNEL.op(x, ids, w, *made, SIGMOID[0].encode(), 0)
    want = exact(x, ids, w, made, SIGMOID[0])
    assert (got.double() - want).abs().max() / want.abs().max() < 3e-2
