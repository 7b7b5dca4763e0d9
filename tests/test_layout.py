"""The repository's own rules."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_no_init_file_shadows_a_public_package() -> None:
    assert not (ROOT / "passes" / "__init__.py").exists()
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert (ROOT / "moefx" / "passes").resolve() == ROOT / "passes"
    assert (ROOT / "moefx" / "kernels").resolve() == ROOT / "kernels"


def test_no_submodule_hides_a_public_name() -> None:
    import moefx

    for name in moefx.__all__:
        assert not (ROOT / "moefx" / f"{name}.py").exists()
        assert callable(getattr(moefx, name))


def test_kernels_never_see_graphs_and_passes_never_see_kernel_insides() -> None:
    for file in (ROOT / "kernels").rglob("*.py"):
        text = file.read_text()
        assert "moefx.passes" not in text and "torch.fx" not in text and "import fx" not in text, file
    for file in (ROOT / "passes").glob("*.py"):
        used = [line for line in file.read_text().splitlines() if "moefx.kernels" in line and "import" in line]
        assert all(line.startswith("from moefx.kernels.base import") for line in used), file


def test_every_pass_shows_before_and_after() -> None:
    for file in (ROOT / "passes").glob("*.py"):
        module = importlib.import_module(f"moefx.passes.{file.stem}")
        assert "->" in (module.__doc__ or ""), file


@pytest.mark.slow
def test_wheel_holds_passes_and_kernels(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)], check=True, capture_output=True, timeout=300
    )
    wheel = zipfile.ZipFile(next(tmp_path.glob("*.whl")))
    names = wheel.namelist()
    assert {"moefx/passes/raise_experts.py", "moefx/kernels/jit_ep/kernel.py", "moefx/__init__.py"} <= set(names)
    assert not any(n.startswith(("passes/", "kernels/", "tests/")) for n in names)
    sources = {f"moefx/kernels/cpu/{f.name}" for f in (ROOT / "kernels" / "cpu").iterdir() if f.suffix in (".cpp", ".h")}
    assert sources <= set(names)
    wheel.extractall(tmp_path / "installed")
    code = "from moefx.kernels.cpu import build; print(build.__file__); assert build.isa() == build.planned_isa(), build.why_not('experts')"
    where = {**os.environ, "PYTHONPATH": str(tmp_path / "installed"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    run = subprocess.run([sys.executable, "-c", code], env=where, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0 and run.stdout.startswith(str(tmp_path)), run.stdout + run.stderr
