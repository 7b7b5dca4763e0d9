"""The CPU kernel as torch calls it: what it takes, what it refuses before anything is read, and that it keeps nothing."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest
import torch
from test_kernels_fp8 import weights

from moefx.activation.spec import Activation
from moefx.kernels.cpu import build, kernel, operators, panels

ACT = Activation("swiglu").encode()
pytestmark = pytest.mark.skipif(build.isa() is None, reason=f"not built here: {build.why_not('experts')}")


@pytest.fixture
def packed() -> tuple:
    torch.manual_seed(0)
    return kernel.PACKED.pack(*weights(Activation("swiglu"), 4, 96, 64, True, torch.float32), ACT)


def call(tokens: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(tokens, 96), torch.rand(tokens, 4).topk(2).indices, torch.rand(tokens, 2)


def test_every_layout_and_type_of_the_arguments_gives_the_same(packed: tuple) -> None:
    x, ids, w = call()
    want = kernel.PACKED.op(x, ids, w, *packed, ACT)
    strided = torch.randn(6, 192)[:, ::2].copy_(x)
    for other in (strided, x.t().contiguous().t()):
        assert torch.equal(kernel.PACKED.op(other, ids, w, *packed, ACT), want)
    for dtype in (torch.int32, torch.int16, torch.uint8):
        assert torch.equal(kernel.PACKED.op(x, ids.to(dtype), w, *packed, ACT), want)
    assert torch.equal(kernel.PACKED.op(x, ids.t().contiguous().t(), w.double().t().contiguous().t(), *packed, ACT), want)


@pytest.mark.parametrize(
    ("ids", "w"),
    [((3, 2), (6, 2)), ((6, 2), (3, 2)), ((6, 3), (6, 2)), ((6, 2), (6,)), ((7, 2), (7, 2))],
    ids=lambda s: "x".join(map(str, s)),
)
def test_shapes_that_do_not_fit_are_refused(packed: tuple, ids: tuple, w: tuple) -> None:
    x = torch.randn(6, 96)
    with pytest.raises(ValueError, match=r"x \[T, H\], ids \[T, K\] and weights \[T, K\] are expected, not \[6, 96\]"):
        kernel.PACKED.op(x, torch.zeros(ids, dtype=torch.int64), torch.ones(w), *packed, ACT)


def test_rows_of_another_width_are_refused(packed: tuple) -> None:
    _, ids, w = call()
    with pytest.raises(ValueError, match=r"x \[6, 97\] does not fit weights packed as \[4, 2, 96, 64, 1\]"):
        kernel.PACKED.op(torch.randn(6, 97), ids, w, *packed, ACT)


def test_types_the_kernel_does_not_multiply_are_refused(packed: tuple) -> None:
    x, ids, w = call()
    with pytest.raises(ValueError, match="x must be bfloat16, float16 or float32"):
        kernel.PACKED.op(x.double(), ids, w, *packed, ACT)


def test_packed_weights_that_were_cut_are_refused(packed: tuple) -> None:
    x, ids, w = call()
    with pytest.raises(ValueError, match="packed weights must be contiguous"):
        kernel.PACKED.op(x, ids, w, packed[0][:, :, :, ::2], *packed[1:], ACT)


def test_an_activation_without_a_formula_is_refused(packed: tuple) -> None:
    with pytest.raises(ValueError, match="unknown activation"):
        kernel.PACKED.op(*call(), *packed, Activation("opaque").encode())


def test_a_fresh_process_calls_before_it_packs(packed: tuple, tmp_path) -> None:
    """As with an unpickled model: the first call loads the library."""
    x, ids, w = call()
    torch.save((x, ids, w, packed, kernel.PACKED.op(x, ids, w, *packed, ACT)), tmp_path / "call.pt")
    code = (
        "import sys, torch; from moefx.kernels.cpu import kernel\n"
        "x, ids, w, packed, want = torch.load(sys.argv[1])\n"
        f"assert torch.equal(kernel.PACKED.op(x, ids, w, *packed, {ACT!r}), want)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code, str(tmp_path / "call.pt")], check=True, timeout=120)


def test_another_library_takes_the_place_of_the_one_before(packed: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    args = call()
    best = kernel.PACKED.op(*args, *packed, ACT)
    before = operators._Current.library
    monkeypatch.setattr(build, "isa", lambda name="experts": "avx2")
    panels.loaded()
    assert operators._Current.library is not before
    assert torch.allclose(kernel.PACKED.op(*args, *packed, ACT), best, atol=1e-5)
    monkeypatch.undo()
    panels.loaded()
    assert torch.equal(kernel.PACKED.op(*args, *packed, ACT), best)


def test_a_call_keeps_no_memory(packed: tuple) -> None:
    """Each of these calls would keep 2 MiB if one handle of its arguments or its result were not given back."""
    wide = kernel.PACKED.pack(*weights(Activation("swiglu"), 1, 96, 32, False, torch.float32), ACT)
    x, ids = torch.randn(96, 5500).t(), torch.zeros(5500, 1, dtype=torch.int16)

    def calls(count: int) -> int:
        for _ in range(count):
            kernel.PACKED.op(x, ids, torch.ones(5500, 1, dtype=torch.float64), *wide, ACT)
            with pytest.raises(ValueError):
                kernel.PACKED.op(x.clone(), ids[1:], torch.ones(5500, 1), *wide, ACT)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    first = calls(10)
    assert calls(60) - first < 30_000
