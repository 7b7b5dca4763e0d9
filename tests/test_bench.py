"""The bench: its JSON, its refusals, and that what it compares computes the same."""

from __future__ import annotations

import importlib.util
import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

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
    assert "H 64, D 32, E 8, top-2, float32" in out and "transformers_eager" in out
