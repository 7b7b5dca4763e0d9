"""Placeholder of the loop capture: replaced by the full module."""
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from moefx import ops


class UntraceableError(Exception):
    """A loop over experts that cannot be made total."""


class PortableGroupedMm(TorchFunctionMode):
    """`F.grouped_mm` outside bf16 becomes `moefx::grouped_mm`: export refuses the former on a CPU."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.grouped_mm, torch._grouped_mm) and args[0].dtype != torch.bfloat16 and kwargs.get("bias") is None:
            offs = kwargs.get("offs", args[2] if len(args) > 2 else None)
            if args[0].dim() == 2 and args[1].dim() == 3 and offs is not None:
                return ops.grouped_mm(args[0], args[1], offs)
        return func(*args, **kwargs)


def export_total(*args: Any, **kwargs: Any) -> Any:
    raise UntraceableError("loops are not traced yet")
