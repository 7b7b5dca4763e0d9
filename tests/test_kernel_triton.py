"""The Triton form of jit_ep's activation without a GPU: interpreted against the CPU form, cross-compiled to cubin and hsaco."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
INTERPRET = """
import numpy, torch, triton
from triton.runtime import interpreter

def convert(value, source, target, rounding=None):
    types = {interpreter.tl.bfloat16: torch.bfloat16, interpreter.tl.float32: torch.float32, interpreter.tl.float8e4nv: torch.float8_e4m3fn}
    bits = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float8_e4m3fn: torch.uint8}
    a, b = types[source], types[target]
    given = torch.from_numpy(numpy.ascontiguousarray(value))
    cast = given.view(torch.uint8).view(a).reshape(value.shape) if given.numel() else given.view(a)
    out = cast.to(b).contiguous()
    return out.view(bits[b]).numpy().view({2: numpy.uint16, 4: numpy.uint32, 1: numpy.uint8}[bits[b].itemsize])

interpreter._convert_float = convert
from moefx.kernels import fp8
from moefx.kernels.jit_ep.activation import act_quant, product
from moefx.kernels.jit_ep.triton_kernel import launch

torch.manual_seed(0)
h = (torch.randn(2, 4, 2048) * 2).to(torch.bfloat16)
masked_m = torch.tensor([4, 1], dtype=torch.int32)
for limit in (None, 0.5):
    for ue8m0 in (False, True):
        q, s = launch(h, masked_m, limit, ue8m0)
        want_q, want_s = act_quant(h, masked_m, limit, ue8m0)
        assert s.shape == want_s.shape and s.stride() == want_s.stride(), (s.shape, s.stride(), want_s.stride())
        if ue8m0:
            assert torch.equal(s, want_s)
            scales = fp8.unpack_ue8m0(want_s)
        else:
            ulps = (s.view(torch.int32) - want_s.view(torch.int32)).abs().max().item()
            assert ulps <= 2, ulps
            scales = want_s
        different = q.view(torch.uint8) != want_q.view(torch.uint8)
        exact = product(h, limit).double() / scales.repeat_interleave(128, -1).clamp_min(1e-30).double()
        lower, upper = q.double().minimum(want_q.double()), q.double().maximum(want_q.double())
        middle = (lower + upper) / 2
        near = (exact - middle).abs() <= middle.abs() * 4 * 2.0**-23
        assert bool((~different | near).all()), int((different & ~near).sum())
        assert different.float().mean() < 0.01
print("agree")
"""


def test_interpreter_agrees_with_the_cpu_form() -> None:
    """UE8M0 scales exact, fp32 scales within 2 ulp, bytes equal but next to a rounding boundary."""
    result = subprocess.run(
        [sys.executable, "-c", INTERPRET],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.stdout.strip().endswith("agree"), result.stderr[-2000:]


@pytest.mark.parametrize(
    ("backend", "arch", "warp", "fp8_type"), [("cuda", 90, 32, "fp8e4nv"), ("cuda", 100, 32, "fp8e4nv"), ("hip", "gfx950", 64, "fp8e4nv")]
)
@pytest.mark.parametrize("ue8m0", [False, True])
def test_cross_compiles(backend: str, arch: int | str, warp: int, fp8_type: str, ue8m0: bool) -> None:
    """To machine code, within the shared memory of an SM90 (232448 bytes), without spills where the tool tells."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from moefx.kernels.jit_ep.triton_kernel import act_quant_kernel

    signature = {
        "h": "*bf16",
        "masked_m": "*i32",
        "q": f"*{fp8_type}",
        "scales": "*i32" if ue8m0 else "*fp32",
        "rows": "i32",
        "columns": "i32",
        "limit": "fp32",
    }
    signature |= {"HAS_LIMIT": "constexpr", "UE8M0": "constexpr"}
    names = list(signature)
    source = ASTSource(
        act_quant_kernel, signature=signature, constexprs={(names.index("HAS_LIMIT"),): True, (names.index("UE8M0"),): ue8m0}
    )
    compiled = triton.compile(source, target=GPUTarget(backend, arch, warp), options={"num_warps": 4})
    assert len(compiled.asm["cubin" if backend == "cuda" else "hsaco"]) > 1000
    assert compiled.metadata.shared <= 232448
