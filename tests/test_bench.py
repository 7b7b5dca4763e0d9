"""The bench: its JSON, its refusals, and that what it compares computes the same."""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moefx import bench, bench_peers
from moefx.cli import main
from moefx.kernels.cpu import build, limits

SMALL = ["--shape", "64,32,8,2", "--tokens", "1,5", "--seconds", "0.05"]
needs_limits = pytest.mark.skipif(build.isa("limits") is None, reason="no compiler, or no instruction set the limits are measured with")


@needs_limits
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "fp8", "int8"])
def test_json(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["bench", *SMALL, "--dtype", dtype, "--json", "--peers", "transformers_eager,transformers_grouped_mm,torch_onednn_loop"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["shape"] == [64, 32, 8, 2] and found["kernel"]
    for row, tokens in zip(found["rows"], (1, 5), strict=True):
        assert row["tokens"] == tokens and row["rounds"] >= 5
        assert row["moefx_ms"] > 0 and row["floor_ms"] > 0 and row["bandwidth_gb_s"] > 0
        assert row["percent_of_floor"] == pytest.approx(100 * row["floor_ms"] / row["moefx_ms"], rel=0.02, abs=0.06)
        for peer in row["peers"].values():
            assert peer["ratio"] == pytest.approx(peer["ms"] / row["moefx_ms"], rel=0.02)
    assert {"transformers_eager", "transformers_grouped_mm"} <= found["rows"][0]["peers"].keys()
    assert ("torch_onednn_loop" in found["missing"]) == (dtype == "float32")


@needs_limits
def test_table_picture_and_skewed_routing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "bench.png"
    drawn = importlib.util.find_spec("matplotlib") is not None
    code = main(["bench", *SMALL, "--routing", "skewed", "--peers", "transformers_eager", "--plot", str(picture)])
    assert code == (0 if drawn else 2) and picture.exists() == drawn
    out = capsys.readouterr()
    assert "transformers_eager" in out.out if drawn else "moefx[plot]" in out.err


@needs_limits
def test_a_contender_that_computes_something_else_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench_peers.PEERS, "transformers_eager", lambda case: lambda x, ids, weights: x * 0)
    with pytest.raises(RuntimeError, match="transformers_eager differs"):
        bench.bench((64, 32, 8, 2), (3,), peers=("transformers_eager",), seconds=0.01)


@needs_limits
def test_compiled_forms_get_graphs_of_their_own_at_each_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[int] = []

    def counting(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph

    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module, **options: compile_with(module, backend=counting, **options))
    names = sorted(bench_peers.MADE_FOR_EACH)
    assert names == ["transformers_batched_mm_compiled", "transformers_eager_compiled", "transformers_grouped_mm_compiled"]
    counts = tuple(range(1, 11))  # more than the eight graphs dynamo keeps of one function
    for name in names:
        graphs.clear()
        found = bench.bench((64, 32, 8, 2), counts, peers=(name,), seconds=0.001)
        assert not found["missing"] and all(name in row["peers"] for row in found["rows"])
        assert len(graphs) >= len(counts), name


@needs_limits
def test_a_form_that_does_not_compile_is_missing_and_the_rest_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        raise NotImplementedError("no backend today")

    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module, **options: compile_with(module, backend=broken, **options))
    peers = ("transformers_eager", "transformers_grouped_mm_compiled")
    found = bench.bench((64, 32, 8, 2), (3,), peers=peers, seconds=0.001)
    assert "no backend today" in found["missing"]["transformers_grouped_mm_compiled at 3 tokens"]
    assert found["rows"][0]["peers"].keys() == {"transformers_eager"}
    assert "transformers_grouped_mm_compiled at 3 tokens: not compared: torch.compile fails" in bench.text(found)


def test_compiling_stops_after_the_call_in_which_its_time_is_up() -> None:
    calls: list[Any] = [(torch.zeros(1),) * 3] * 4
    met: list[Any] = []

    def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        met.append(ids)
        return x

    bench_peers.compile_for(run, calls, seconds=0.0)
    assert len(met) == 1
    bench_peers.compile_for(run, calls, seconds=60.0)
    assert len(met) == 5


def test_best_of_transformers() -> None:
    times = {"sgl_fused_experts": 1.0, "transformers_eager": 4.0, "transformers_grouped_mm_compiled": 3.0, "transformers_grouped_mm": 5.0}
    peers = {name: {"ms": ms, "ratio": ms / 2} for name, ms in times.items()}
    best = bench._best_transformers(peers)
    assert best == {"name": "transformers_grouped_mm_compiled", "ratio": 1.5}
    assert bench._best_transformers({"sgl_fused_experts": {"ms": 1.0, "ratio": 0.5}}) is None
    row = {"tokens": 1, "bandwidth_gb_s": 1.0, "moefx_ms": 2.0, "floor_ms": 1.0, "percent_of_floor": 50.0}
    rows = [{**row, "peers": peers, "best_transformers": best}, {**row, "peers": {}, "best_transformers": None}]
    found = {"shape": (1, 1, 1, 1), "dtype": "int8", "routing": "even", "threads": 1, "kernel": "k", "missing": {}, "rows": rows}
    assert "best of transformers" in bench.text(found) and "grouped_mm_compiled (1.50)" in bench.text(found)
    assert "best of transformers" not in bench.text({**found, "rows": rows[1:]})


@needs_limits
def test_zentorch_int8_is_given_int8_rows_and_their_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stand-in with the op's arguments, as its documentation has them."""
    flushed: list[int] = []

    def fused(out, x, w13, w2, b13, b2, weights, ids, skip_weighted, act, s13, s2) -> None:
        assert w13.dtype == w2.dtype == torch.int8 and s13.dtype == s2.dtype == weights.dtype == torch.float32 and ids.dtype == torch.int32
        assert s13.shape == w13.shape[:2] and s2.shape == w2.shape[:2] and (b13, b2, skip_weighted, act) == (None, None, False, "silu")
        assert w13.abs().amax(-1).eq(127).all() and w2.abs().amax(-1).eq(127).all()
        out.zero_()
        for t, k in torch.ones_like(ids).nonzero().tolist():
            e = ids[t, k]
            gate, up = F.linear(x[t].float(), w13[e] * s13[e, :, None]).chunk(2)
            out[t] += weights[t, k] * F.linear(F.silu(gate) * up, w2[e] * s2[e, :, None])

    stand_in = ModuleType("zentorch")
    stand_in.__spec__ = importlib.util.spec_from_loader("zentorch", loader=None)
    monkeypatch.setitem(sys.modules, "zentorch", stand_in)
    ops = SimpleNamespace(zentorch_fused_moe=fused, zentorch_flush_moe_weight_cache=lambda: flushed.append(1))
    monkeypatch.setattr(torch.ops, "zentorch", ops, raising=False)
    found = bench.bench((64, 32, 8, 2), (1, 5), dtype="int8", peers=("zentorch_int8",), seconds=0.01)
    assert not found["missing"] and all(row["peers"].keys() == {"zentorch_int8"} for row in found["rows"]) and flushed == [1]


@pytest.mark.skipif(importlib.util.find_spec("zentorch") is None, reason="zentorch is not installed")
def test_zentorch_int8_on_other_weights_at_the_same_address(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[torch.Size, tuple[torch.Tensor, torch.Tensor]] = {}
    quantise = bench_peers._int8

    def in_place(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = quantise(w)
        first = kept.setdefault(w.shape, made)
        for old, new in zip(first, made, strict=True):
            old.copy_(new)
        return first

    monkeypatch.setattr(bench_peers, "_int8", in_place)
    for _ in range(3):
        w13, w2 = (torch.randn(8, 64, 64) / 8).bfloat16(), (torch.randn(8, 64, 32) / 8).bfloat16()
        case = bench_peers.Case(64, 32, 8, 2, 5, "int8", w13, w2)
        call = bench._call(case, "even")
        with torch.inference_mode():
            assert bench._error(bench_peers.zentorch_int8(case)(*call), bench_peers.transformers_eager(case)(*call).float()) < 0.15


@needs_limits
def test_zentorch_int8_is_for_int8() -> None:
    found = bench.bench((64, 32, 8, 2), (1,), peers=("zentorch_int8",), seconds=0.01)
    assert found["missing"] == {"zentorch_int8": "compared in int8"} and found["rows"][0]["best_transformers"] is None


def test_int8_rows_of_zeros_and_rounding() -> None:
    w = torch.randn(3, 5, 16).bfloat16()
    w[1, 2] = 0
    values, scales = bench_peers._int8(w)
    assert (values * scales[..., None] - w.float()).abs().le(scales[..., None] * 0.501).all()
    assert values[1, 2].eq(0).all()


@needs_limits
def test_many_tokens_of_many_experts_and_skewed_routing() -> None:
    peers = ("transformers_eager", "transformers_batched_mm_compiled")
    found = bench.bench((256, 128, 256, 8), (4096,), peers=peers, seconds=0.01, routing="skewed")
    assert found["rows"][0]["peers"].keys() == {"transformers_eager"} and found["rows"][0]["rounds"] == 5
    assert found["missing"] == {"transformers_batched_mm_compiled at 4096 tokens": "gathers 6 GiB of weights a call"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--shape", "64,32,8"], "four positive sizes"),
        (["--shape", "64,32,2,3"], "K <= E"),
        (["--tokens", "0"], "at least 1"),
        (["--tokens", "x"], "must be a number"),
        (["--dtype", "int3"], "dtype='int3'"),
        (["--peers", "nobody"], "peer='nobody'"),
        (["--routing", "odd"], "routing='odd'"),
    ],
)
def test_bad_input(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *SMALL, *arguments]) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


@needs_limits
def test_limits_of_this_machine() -> None:
    memory = torch.ones(1 << 22, dtype=torch.int64)
    assert 1e8 < limits.bytes_a_second(memory) < 1e13
    assert limits.flops("fp32") > 1e8


def test_skewed_routing_sends_most_tokens_to_few_experts() -> None:
    torch.manual_seed(0)
    case = bench_peers.Case(8, 8, 100, 2, 400, "bfloat16", torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1))
    counts: Any = bench._call(case, "skewed")[1].flatten().bincount(minlength=100).sort(descending=True).values
    assert counts[:15].sum() > 0.7 * counts.sum() > 0


@pytest.mark.slow
def test_whole_model() -> None:
    from moefx import bench_model

    found = bench_model.end_to_end(layers=1, prompt=8, new_tokens=2, rounds=1)
    assert [row["form"] for row in found["rows"]] == ["moefx", "transformers_eager", "transformers_grouped_mm"]
    assert found["rows"][0]["generate_ratio"] == 1.0 and "prefill" in bench_model.text(found)


@needs_limits
def test_example(capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "bench_experts.py"))
    example["main"](["--shape", "64,32,8,2", "--tokens", "1,5", "--seconds", "0.05", "--dtype", "float32"])
    out = capsys.readouterr().out
    assert "H 64, D 32, E 8, top-2, float32" in out and "transformers_eager" in out and "best of transformers" in out
