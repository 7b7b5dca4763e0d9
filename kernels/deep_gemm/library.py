"""The installed `deep_gemm` module, if it works here: its grouped GEMMs by attribute and signature, and the text of why not.

Builds differ in what their import raises without CUDA and in the names of optional arguments; both are probed, never assumed.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

DEFAULT_ALIGNMENT = 128


@functools.cache
def load() -> tuple[ModuleType | None, str]:
    """(module, "") or (None, why it can't be used)."""
    try:
        module = importlib.import_module("deep_gemm")
    except (ImportError, OSError, AssertionError, RuntimeError) as error:
        return None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    missing = [n for n in ("m_grouped_bf16_gemm_nt_contiguous", "m_grouped_fp8_gemm_nt_masked") if not hasattr(module, n)]
    return (None, f"this build has no {', '.join(missing)}") if missing else (module, "")


def alignment() -> int:
    """Rows each group of the contiguous layout is padded to: a global of the process, read when a layout is built and again at the call."""
    module, _ = load()
    found = getattr(module, "get_mk_alignment_for_contiguous_layout", None)
    return int(found()) if found is not None else DEFAULT_ALIGNMENT


def call(name: str, a: Any, b: Any, d: torch.Tensor, *layout: Any, **optional: Any) -> torch.Tensor:
    """`deep_gemm.<name>(a, b, d, *layout)` with the optional arguments this build knows. RuntimeError where it is not usable."""
    module, why = load()
    if module is None:
        raise RuntimeError(f"deep_gemm can't be used here ({why}); install sgl-deep-gemm for CUDA, or disable the deep_gemm kernels")
    function: Callable[..., Any] | None = getattr(module, name, None)
    if function is None:
        raise RuntimeError(f"this build of deep_gemm has no {name}; disable the kernel that needs it")
    function(a, b, d, *layout, **{k: v for k, v in optional.items() if k in _parameters(function)})
    return d


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return frozenset()
