"""`moefx.plan`, its command line and its reports: the founding cases, matrices, agreement with the traced module."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import moe_blocks as blocks
import pytest
import torch

import moefx
from moefx.activation.spec import Activation
from moefx.cli import main
from moefx.contract import Predicate, evaluate
from moefx.decision import decide
from moefx.kernels.registry import KERNELS
from moefx.layer import Layer
from moefx.models import BUILT_IN
from moefx.options import Options
from moefx.planner import plan


def layer(name: str, **options: Any) -> dict[str, Any]:
    return plan(name, **options).layers[0]


def candidate(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(c for c in found["experts"]["candidates"] if c["kernel"] == name)


def predicate(found: dict[str, Any], name: str, text: str) -> dict[str, Any]:
    return next(p for p in candidate(found, name)["predicates"] if p["text"] == text)


def test_founding_case_one() -> None:
    """Qwen3.5-35B-A3B in FP8 on two ranks: the JIT activation kernel is refuted by the guard that was missing."""
    found = layer("qwen3.5-35b-a3b", ep_size=2, target="sm90", precision="fp8")
    assert found["dims"] == {"E_total": 256, "E": 128, "D": 512, "G": 4, "H": 2048, "K": 8}
    assert found["experts"]["kernel"] == "fp8_fallback"
    assert candidate(found, "jit_ep")["status"] == "refuted"
    assert candidate(found, "jit_ep")["value_checks"] == ["sum(masked_m) <= N * K"]
    guard = predicate(found, "jit_ep", "D // 8 >= E")
    assert guard == {"text": "D // 8 >= E", "values": {"D": 512, "E": 128}, "lhs": 64, "rhs": 128, "status": "refuted"}


@pytest.mark.parametrize(("ep_size", "placement", "status"), [(4, "unfused", "refuted"), (8, "fused", "proved")])
def test_kernel_and_placement_are_chosen_together(ep_size: int, placement: str, status: str) -> None:
    found = layer("qwen3.5-35b-a3b", ep_size=ep_size, target="sm90", precision="fp8")
    assert found["experts"]["kernel"] == "jit_ep"
    assert predicate(found, "jit_ep", "D // 8 >= E")["status"] == "proved"
    assert candidate(found, "jit_ep+shared")["status"] == status
    assert found["shared_expert"]["placement"] == placement
    with_slot = predicate(found, "jit_ep+shared", "D // 8 >= E")
    assert (with_slot["lhs"], with_slot["rhs"]) == (64, 256 // ep_size + 1)


@pytest.mark.parametrize("a2a", ["mori", "deepep"])
def test_founding_case_two(a2a: str) -> None:
    """One shared-expert slot per rank does not fit one global shared expert: a separate MLP, with the reason."""
    found = layer("qwen3.5-397b-a17b", ep_size=8, a2a=a2a)["shared_expert"]
    assert found["placement"] == "unfused"
    assert f"a2a='{a2a}'" in found["reason"] and "(512 + 1 - 8) % 8 = 1" in found["reason"]
    assert layer("qwen3.5-397b-a17b", ep_size=8, a2a="none")["shared_expert"]["placement"] == "fused"
    assert layer("qwen3.5-397b-a17b", ep_size=1, a2a=a2a)["shared_expert"]["placement"] == "fused"


BASE = Layer("layer", "grouped_mm", 64, 1024, 2048, 8, Activation("swiglu"), "bfloat16", "bfloat16")
REFUSED = [
    ({"D": 1280}, "G % 4 == 0"),
    ({"D": 256, "E_total": 64}, "D // 8 >= E"),
    ({"D": 1000}, "D % 128 == 0"),
    ({"D": 1152}, "(D // 8) % 32 == 0"),
    ({"D": 16384}, "0 < D // 8 <= 1024"),
    ({"D": 8192, "E_total": 512}, "E <= 256"),
    ({"H": 2000}, "H % 128 == 0"),
    ({"dtype": "float16"}, "dtype == 'bfloat16'"),
    ({"activation": Activation("geglu")}, "activation == 'swiglu'"),
    ({"activation": Activation("swiglu", limit=7.0, clamp="post")}, "clamp in (None, 'pre')"),
    ({"bias": True}, "bias == False"),
]


@pytest.mark.parametrize(("change", "text"), REFUSED, ids=[t for _, t in REFUSED])
def test_every_predicate_of_jit_ep_refuses(change: dict[str, Any], text: str) -> None:
    from dataclasses import replace

    options = Options(target="sm90", precision="fp8")
    assert decide(BASE, options).kernel.name == "jit_ep"  # type: ignore[union-attr]
    found = decide(replace(BASE, **change), options)
    outcome = next(o for o in found.candidates if o.kernel == "jit_ep")
    assert text in [p.text for p in outcome.predicates if p.status == "refuted"]
    assert found.kernel is not None and found.kernel.name == "fp8_fallback"


def test_padded_rows_are_proved_and_loose_ones_refuted() -> None:
    from moefx.contract import Range

    assert evaluate(Predicate("N % 4 == 0"), {"N": Range(128, None, 128)}).status == "proved"
    assert evaluate(Predicate("N % 4 == 0"), {"N": Range(1)}).status == "refuted"


def test_every_kernel_is_a_candidate_somewhere_and_grouped_mm_is_the_last_resort() -> None:
    for name in BUILT_IN:
        for target in ("cpu", "sm90", "gfx950"):
            for precision in ("preserve", "fp8", "int8"):
                found = layer(name, target=target, precision=precision)
                assert found["experts"]["kernel"] in {k.name for k in KERNELS}, (name, target)
    assert layer("mixtral-8x7b", precision="fp8", target="sm90", disable=("fp8_fallback", "jit_ep"))["experts"]["kernel"] == "grouped_mm"
    assert "own precision" in layer("mixtral-8x7b", precision="int8", target="sm90")["warnings"][0]


def test_precision_is_never_lowered_unless_asked() -> None:
    for name in BUILT_IN:
        assert layer(name, target="sm90")["experts"]["kernel"] == "grouped_mm"


def test_fp8_checkpoint_makes_fp8_kernels_candidates(tmp_path: Path) -> None:
    config = {**BUILT_IN["qwen3.5-35b-a3b"][0], "quantization_config": {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]}}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config, "model_type": "qwen3_5_moe"}))
    assert plan(tmp_path, ep_size=4, target="sm90").layers[0]["experts"]["kernel"] == "jit_ep"
    config["quantization_config"]["modules_to_not_convert"] = ["mlp.shared_expert"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    shared = plan(tmp_path / "config.json", ep_size=8, target="sm90").layers[0]["shared_expert"]
    assert shared["placement"] == "unfused" and "weight formats differ" in shared["reason"]


@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen2_moe", "mixtral", "deepseek_v3", "deepseek_v4", "glm4_moe", "gpt_oss", "olmoe"])
def test_config_and_module_agree(name: str) -> None:
    pytest.importorskip("transformers")
    from tiny_models import build

    model = build(name, torch.bfloat16)
    from_config, from_module = plan(model.config, ep_size=2).layers, plan(model.to("meta"), ep_size=2).layers
    assert len(from_module) == 2 and len(from_config) == 1
    for traced in from_module:
        assert traced["rewritten"], traced["reason"]
        assert not traced["check"]["ran"]
        for key in ("dims", "experts", "form", "dtype"):
            assert traced[key] == from_config[0][key], key
        for key in ("kind", "limit", "clamp", "alpha", "beta", "columns"):
            assert traced["activation"][key] == from_config[0]["activation"][key], key
        for key in ("present", "gate", "placement"):
            assert traced["shared_expert"][key] == from_config[0]["shared_expert"][key], key


BAD = [
    (("nonesuch",), {}, ValueError, "no built-in model"),
    (("qwen3.5-35b-a3",), {}, ValueError, "did you mean qwen3.5-35b-a3b"),
    (("./nowhere/config.json",), {}, ValueError, "does not exist"),
    ((3,), {}, TypeError, "got int"),
    (("mixtral-8x7b",), {"ep_size": 3}, ValueError, "8 routed experts .* ep_size=3"),
    (("mixtral-8x7b",), {"ep_size": 16}, ValueError, "more than the 8"),
    (("mixtral-8x7b",), {"target": "x"}, ValueError, "target='x'"),
    (("mixtral-8x7b",), {"tokens": -1}, ValueError, "tokens=-1"),
    (({"model_type": "zork", "num_experts": 4, "hidden_size": 8},), {}, ValueError, "zork"),
    (({"model_type": "mixtral", "num_local_experts": 4},), {}, ValueError, "hidden_size"),
]


@pytest.mark.parametrize(("arguments", "options", "kind", "text"), BAD, ids=range(len(BAD)))
def test_bad_input(arguments: tuple[Any, ...], options: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        plan(*arguments, **options)


def test_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["plan", "qwen3.5-35b-a3b", "--ep-size", "2", "--target", "sm90", "--precision", "fp8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"][0]["experts"]["kernel"] == "fp8_fallback"
    assert main(["plan", "qwen3.5-35b-a3b", "--ep-size", "1,2", "--target", "sm90,cpu", "--a2a", "none,mori", "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert [(p["ep_size"], p["a2a"], p["target"]) for p in plans][:3] == [(1, "local", "sm90"), (1, "local", "cpu"), (1, "local", "sm90")]
    assert {(p["ep_size"], p["a2a"], p["target"]) for p in plans} >= {(2, "none", "sm90"), (2, "mori", "cpu")}
    page = tmp_path / "plan.html"
    assert main(["plan", "deepseek-v4-flash", "--ep-size", "2,4", "--target", "sm90", "--precision", "fp8", "--html", str(page)]) == 0
    assert "D // 8 &gt;= E" in page.read_text() and "http" not in page.read_text()
    capsys.readouterr()
    assert main(["plan", "qwen3.5-35b-a3b"]) == 0
    assert "grouped_mm" in capsys.readouterr().out
    assert main(["plan", "mixtral-8x7b", "--ep-size", "1,2"]) == 0
    assert main(["plan", "--list"]) == 0
    assert "MixtralConfig" in capsys.readouterr().out
    assert main(["doctor"]) == 0
    assert "torch.distributed" in capsys.readouterr().out
    for wrong in (
        ["plan", "zork"],
        ["plan"],
        ["plan", "mixtral-8x7b", "--ep-size", "two"],
        ["plan", "mixtral-8x7b", "--a2a", "x"],
        ["plan", "mixtral-8x7b", "--html", "/no/such/folder/x.html"],
    ):
        assert main(wrong) == 2
        error = capsys.readouterr().err
        assert error.startswith("moefx: ") and "Traceback" not in error and error.count("\n") == 1


def test_a_plan_is_quick_and_light() -> None:
    """No transformers for a built-in name; seconds beyond importing torch and sympy under 3."""
    code = (
        "import sys, time, torch, sympy; t = time.perf_counter(); import moefx; "
        "moefx.plan('deepseek-v3', ep_size=8, target='sm100', precision='fp8').to_text(); "
        "print(time.perf_counter() - t, 'transformers' in sys.modules)"
    )
    started = time.perf_counter()
    seconds, loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert float(seconds) < 3 and loaded == "False" and time.perf_counter() - started < 60


def test_importing_moefx_imports_no_torch() -> None:
    code = "import sys, moefx; print('torch' in sys.modules, 'sympy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == ["False", "False"]


def test_report_text_and_names() -> None:
    model = torch.nn.ModuleDict({"one": blocks.ClampPre(), "two": blocks.WeightedInput()}).eval()
    model.forward = lambda x: model["two"](model["one"](x))  # type: ignore[method-assign]
    report = moefx.report(moefx.optimize(model))
    shown = report.to_text()
    assert "swiglu pre-clamp 0.5" in shown and "left alone" in shown and "separates them from the router" in shown
    found = json.loads(report.to_json())
    assert {"moefx", "target", "ep_size", "a2a", "precision", "layers", "skipped"} <= set(found)
    assert [x["name"] for x in found["layers"]] == ["one", "two"]
    assert {"name", "rewritten", "form", "reason", "dims", "activation", "experts", "shared_expert", "check"} <= set(found["layers"][0])


def test_html_shows_the_graphs_of_a_traced_module(tmp_path: Path) -> None:
    report = moefx.report(moefx.optimize(blocks.Gathered().eval()))
    report.to_html(str(tmp_path / "report.html"))
    text = (tmp_path / "report.html").read_text()
    assert "graph before" in text and "moefx.experts_" in text
