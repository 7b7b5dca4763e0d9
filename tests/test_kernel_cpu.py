"""The packed CPU kernel in the model's own precision: against float64 on every instruction set of this host, and at the edges."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from test_kernels_fp8 import ACTIVATIONS, SWIGLU, exact, weights
from torch.library import opcheck

from moefx import ops
from moefx.activation.spec import Activation
from moefx.kernels.base import Kernel
from moefx.kernels.cpu import build, kernel
from moefx.kernels.registry import KERNELS

HERE = Path(__file__).parent
BUILT = [i for i in build.INSTRUCTIONS if build.library("experts", i) is not None]
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 4e-6}
pytestmark = pytest.mark.skipif(not BUILT, reason=f"not built here: {build.why_not('experts')}")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=BUILT)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(build, "isa", lambda name="experts": request.param)
    return request.param


def run(x, ids, w, made, act: Activation, first: int = 0) -> torch.Tensor:
    return kernel.PACKED.op(x, ids, w, *kernel.PACKED.pack(*made, act.encode()), act.encode(), first)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).abs().max() / want.abs().max()).item()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("act", ACTIVATIONS, ids=lambda a: f"{a.kind}-{a.columns}-{a.clamp}")
@pytest.mark.parametrize(("hidden", "width"), [(96, 64), (200, 70), (33, 31)])
def test_against_float64(isa: str, act: Activation, dtype: torch.dtype, hidden: int, width: int) -> None:
    for tokens, bias in [(1, False), (5, True), (17, False), (430, True)]:
        made = weights(act, 5, hidden, width, bias, dtype)
        x, ids, w = torch.randn(tokens, hidden).to(dtype), torch.rand(tokens, 5).topk(2).indices, torch.rand(tokens, 2)
        assert error(run(x, ids, w, made, act), exact(x, ids, w, made, act)) < TOLERANCE[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("case", range(1000))
def test_random_cases(case: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(case)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), ()))]

    chosen, dtype, act = pick(*BUILT), pick(*TOLERANCE), pick(*ACTIVATIONS)
    monkeypatch.setattr(build, "isa", lambda name="experts": chosen)
    hidden, width, tokens, experts = (int(torch.randint(1, most, ())) for most in (700, 300, 90, 9))
    top_k = int(torch.randint(1, experts + 1, ()))
    made = weights(act, experts, hidden, width, pick(True, False), dtype)
    x, ids, w = torch.randn(tokens, hidden).to(dtype), torch.rand(tokens, experts).topk(top_k).indices, torch.rand(tokens, top_k)
    assert error(run(x, ids, w, made, act), exact(x, ids, w, made, act)) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("act", ACTIVATIONS, ids=lambda a: f"{a.kind}-{a.columns}")
def test_packing_is_lossless(act: Activation, dtype: torch.dtype) -> None:
    made = weights(act, 3, 50, 37, True, dtype)
    transposed = [made[0].transpose(1, 2).contiguous().transpose(1, 2), *made[1:]]
    for given in (made, transposed):
        back = kernel.unpack(kernel.PACKED.pack(*given, act.encode()), 50, 37, act.encode())
        assert all(torch.equal(a, b) for a, b in zip(back, made, strict=True))


def test_results_do_not_depend_on_threads() -> None:
    made = weights(SWIGLU, 6, 256, 96, True, torch.bfloat16)
    before = torch.get_num_threads()
    try:
        for tokens in (1, 33, 700):
            x, ids, w = torch.randn(tokens, 256).bfloat16(), torch.rand(tokens, 6).topk(3).indices, torch.rand(tokens, 3)
            results = []
            for threads in (1, 2, 3, 7):
                torch.set_num_threads(threads)
                results.append(run(x, ids, w, made, SWIGLU))
            assert all(torch.equal(r, results[0]) for r in results)
    finally:
        torch.set_num_threads(before)


def test_edges(isa: str) -> None:
    """No token; ids of other ranks; an id twice; all rows to one expert; 32-bit ids, bf16 routing weights, strided inputs."""
    made = weights(SWIGLU, 4, 96, 64, False, torch.bfloat16)
    assert run(torch.empty(0, 96).bfloat16(), torch.empty(0, 2).long(), torch.empty(0, 2), made, SWIGLU).shape == (0, 96)
    x, w = torch.randn(300, 96).bfloat16(), torch.rand(300, 2)
    assert (run(x, torch.full((300, 2), -1), w, made, SWIGLU) == 0).all()
    for ids in (torch.tensor([[1, 1]] * 300), torch.tensor([[2, 9]] * 300), torch.randint(-2, 6, (300, 2))):
        assert error(run(x, ids, w, made, SWIGLU), exact(x, ids, w, made, SWIGLU)) < 1e-2
        assert torch.equal(run(x, ids, w, made, SWIGLU), run(x, ids + 5, w, made, SWIGLU, 5))
        narrow = run(x, ids.int(), w.bfloat16(), made, SWIGLU)
        assert error(narrow, exact(x, ids, w.bfloat16(), made, SWIGLU)) < 1e-2
        wide = torch.randn(300, 192).bfloat16()
        assert torch.equal(run(wide[:, ::2], ids, w, made, SWIGLU), run(wide[:, ::2].contiguous(), ids, w, made, SWIGLU))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("act", ACTIVATIONS, ids=lambda a: f"{a.kind}-{a.clamp}")
def test_nan_and_infinity_stay_in_their_rows(isa: str, act: Activation, dtype: torch.dtype) -> None:
    made = weights(act, 4, 96, 64, False, dtype)
    x, ids, w = torch.randn(8, 96).to(dtype), torch.rand(8, 4).topk(2).indices, torch.rand(8, 2)
    x[2, 5], x[4, 7], x[5, 0] = float("nan"), float("inf"), -float("inf")
    got, want = run(x, ids, w, made, act), exact(x, ids, w, made, act)
    assert torch.equal(got.isnan(), want.isnan())
    assert got[2].isnan().all()
    rest = [0, 1, 3, 6, 7]
    assert error(got[rest], want[rest]) < TOLERANCE[dtype]


def test_another_type_than_the_weights_is_refused() -> None:
    made = weights(SWIGLU, 4, 96, 64, False, torch.bfloat16)
    with pytest.raises(ValueError, match="float32.*bfloat16"):
        run(torch.randn(2, 96), torch.zeros(2, 1).long(), torch.ones(2, 1), made, SWIGLU)


@pytest.mark.parametrize("of", [k for k in KERNELS if not k.name.startswith("deep_gemm")], ids=lambda k: k.name)
def test_ids_and_weights_of_other_rows_than_x_are_refused(of: Kernel) -> None:
    """A kernel would read past their ends, torch operations would spread or shift them."""
    if of is kernel.INT8_COLUMNS and "avx512_bf16" not in BUILT:
        pytest.skip("no int8 products on this CPU")
    text = SWIGLU.encode()
    packed = of.pack(*weights(SWIGLU, 4, 256, 128, False, torch.bfloat16), text)
    x, ids, w = torch.randn(6, 256).bfloat16(), torch.rand(6, 4).topk(2).indices, torch.rand(6, 2)
    wide = torch.cat([ids, ids[:, :1]], 1)
    for wrong in (
        (x, ids[:3], w[:3]),
        (x, ids, w[:3]),
        (x, ids, w[:1]),
        (x, wide, w),
        (x, ids, torch.rand(6, 3)),
        (x[:3], ids, w),
        (x[0], ids, w),
    ):
        with pytest.raises(ValueError, match=r"ids \[T, K\] and weights \[T, K\] are expected, not \[.*cut x"):
            of.op(*wrong, *packed, text)
        with pytest.raises(ValueError, match="cut x"):
            ops.experts(*wrong, *weights(SWIGLU, 4, 256, 128, False, torch.bfloat16), text)


def test_panels_of_another_layer_are_refused() -> None:
    text = SWIGLU.encode()
    x, ids, w = torch.randn(3, 96), torch.rand(3, 4).topk(2).indices, torch.rand(3, 2)

    def pack(experts: int, hidden: int, width: int, dtype: torch.dtype = torch.float32):
        return kernel.PACKED.pack(*weights(SWIGLU, experts, hidden, width, False, dtype), text)

    mine = pack(4, 96, 70)
    kernel.PACKED.op(x, ids, w, *mine, text)
    for other in (pack(3, 96, 70), pack(4, 200, 70), pack(4, 96, 40)):
        for mixed in ((*mine[:2], *other[2:]), (*other[:2], *mine[2:])):
            with pytest.raises(ValueError, match=r"does not fit weights packed as|pack (both|all) of one layer"):
                kernel.PACKED.op(x, ids, w, *mixed, text)
    with pytest.raises(ValueError, match="for the activation of the call"):
        kernel.PACKED.op(x, ids, w, *mine, Activation("relu2").encode())
    with pytest.raises(ValueError, match="of one layer and type"):
        kernel.PACKED.op(x, ids, w, *mine[:2], *pack(4, 96, 70, torch.float16)[2:], text)
    with pytest.raises(ValueError, match=r"\[3, 192\] has not the 4 experts"):
        kernel.PACKED.op(x, ids, w, mine[0], torch.zeros(3, 192), *mine[2:], text)


def test_op_is_well_formed() -> None:
    made = weights(SWIGLU, 4, 96, 64, True, torch.bfloat16)
    packed = kernel.PACKED.pack(*made, SWIGLU.encode())
    x, ids, w = torch.randn(5, 96).bfloat16(), torch.rand(5, 4).topk(2).indices, torch.rand(5, 2)
    opcheck(kernel.PACKED.op, (x, ids, w, *packed, SWIGLU.encode(), 0))
    assert error(kernel.PACKED.reference(x, ids, w, *packed, SWIGLU.encode(), 0), exact(x, ids, w, made, SWIGLU)) < 2e-2


def test_a_forked_child_makes_threads_of_its_own() -> None:
    made = weights(SWIGLU, 4, 96, 64, False, torch.bfloat16)
    x, ids, w = torch.randn(40, 96).bfloat16(), torch.rand(40, 4).topk(2).indices, torch.rand(40, 2)
    packed = kernel.PACKED.pack(*made, SWIGLU.encode())
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        want = kernel.PACKED.op(x, ids, w, *packed, SWIGLU.encode(), 0)
        child = os.fork()
        if child == 0:
            same = all(torch.equal(kernel.PACKED.op(x, ids, w, *packed, SWIGLU.encode(), 0), want) for _ in range(20))
            os._exit(0 if same else 1)
        for _ in range(200):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            time.sleep(0.05)
        else:
            os.kill(child, 9)
            os.waitpid(child, 0)
            raise AssertionError("the child hung")
        assert status == 0
    finally:
        torch.set_num_threads(before)


def _python(code: str, *args: str, **env: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(HERE), str(HERE.parent)])
    where = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "2", **env}
    return subprocess.Popen([sys.executable, code, *args], env=where, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def test_two_processes_build_at_once(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(f"from moefx.kernels.cpu import build\nassert build.library('experts', {BUILT[0]!r}), build.why_not('experts')")
    both = [_python(str(script), XDG_CACHE_HOME=str(tmp_path)) for _ in range(2)]
    for process in both:
        out, _ = process.communicate(timeout=240)
        assert process.returncode == 0, out
    assert len(list((tmp_path / "moefx").iterdir())) == 1


LOAD = """
from moefx.kernels.cpu import build
print(build.isa("limits"), "|", build.why_not("limits"), "|", build.library("limits", build.isa("limits"))._name)
"""


def load(**env: str) -> str:
    """`isa | why_not | path` of the smallest library, in a process of its own."""
    process = _python("-c", LOAD, **env)
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0, out
    return out.strip()


def test_a_damaged_library_is_built_again(tmp_path: Path) -> None:
    where = {"XDG_CACHE_HOME": str(tmp_path)}
    want = load(**where)
    (file,) = (tmp_path / "moefx").iterdir()
    assert want == f"{BUILT[0]} | None | {file}"
    code = file.read_bytes()
    for damaged in (b"", code[: len(code) // 2], code[:4096] + bytes(2048) + code[6144:], code[:-32]):
        file.write_bytes(damaged)
        assert load(**where) == want
        assert len(file.read_bytes()) == len(code)
    foreign = b"whole, but no library for this machine"
    file.write_bytes(foreign + hashlib.sha256(foreign).digest())
    assert load(**where, TMPDIR=str(tmp_path)) == f"{BUILT[0]} | None | {tmp_path / f'moefx-{os.geteuid()}' / file.name}"


def test_without_a_home_or_a_writable_cache_the_temporary_folder_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own, compiler = tmp_path / f"moefx-{os.geteuid()}", build._compiler()
    assert compiler is not None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert Path(build._loaded("limits", BUILT[0], compiler)._name).parent == own
    assert own.stat().st_mode & 0o777 == 0o700
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert Path(build._loaded("limits", BUILT[0], compiler)._name).parent == own
    own.chmod(0o777)
    with pytest.raises(OSError, match=f"home directory.*{own} is not a folder that user .* remove it"):
        build._loaded("limits", BUILT[0], compiler)
    own.rename(tmp_path / "elsewhere")
    own.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="is not a folder that user"):
        build._loaded("limits", BUILT[0], compiler)


@pytest.mark.skipif(len(BUILT) < 2, reason="this CPU has one instruction set only")
def test_doctor_says_why_a_slower_instruction_set_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from moefx import doctor

    real = build._loaded

    def fails_on_the_best(name: str, isa: str, compiler: str):
        if isa == BUILT[0]:
            raise subprocess.CalledProcessError(1, [compiler], stderr="unrecognized option '-mnew'\n")
        return real(name, isa, compiler)

    monkeypatch.setattr(build, "_loaded", fails_on_the_best)
    monkeypatch.setattr(build, "_FAILED", {})
    monkeypatch.setattr(build, "_REASONS", {})
    build.library.cache_clear(), build.isa.cache_clear()
    try:
        shown = doctor.examine()["kernels"]["cpu_packed"]
        assert shown == f"this CPU (C++, {BUILT[1]}; {BUILT[0]}: the build failed: unrecognized option '-mnew')"
    finally:
        build.library.cache_clear(), build.isa.cache_clear()


def test_a_compiler_that_does_not_run_is_a_fact_for_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moefx import doctor

    broken = tmp_path / "c++"
    broken.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for content, why in (
        ("no program", "Exec format error"),
        ("#!/bin/sh\nexit 3", "exit status 3"),
        ("#!/bin/sh\nexec /bin/sleep 60", "timed out"),
    ):
        broken.write_text(content)
        with monkeypatch.context() as quick:
            quick.setattr(subprocess, "run", functools.partial(_at_most_a_second, subprocess.run))
            assert why in doctor._compiler()


def _at_most_a_second(run, *args, **named):
    assert named["timeout"] <= 20
    return run(*args, **{**named, "timeout": 1})


@pytest.mark.slow
def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    found = subprocess.run(["c++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip("this compiler has no libasan")
    process = _python(str(HERE / "cpu_sanitizer_main.py"), str(tmp_path), LD_PRELOAD=found, ASAN_OPTIONS="detect_leaks=0")
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0 and "clean" in out, out[-4000:]


def test_without_a_compiler_torch_operations_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    from moefx.decision import decide
    from moefx.layer import Layer
    from moefx.options import Options

    layer = Layer("layer", "grouped_mm", 8, 64, 96, 2, SWIGLU, "bfloat16", "bfloat16")
    chosen = decide(layer, Options()).kernel
    assert chosen is not None and chosen.name == "cpu_packed"
    monkeypatch.setattr(build, "_compiler", lambda: None)
    decision = decide(layer, Options())
    assert decision.kernel is not None and decision.kernel.name == "grouped_mm"
    refused = next(c for c in decision.candidates if c.kernel == "cpu_packed").first_failure()
    assert refused is not None and refused.values == {"isa": None} and "compiler" in refused.why
