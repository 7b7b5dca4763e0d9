"""moefx: a graph compiler for mixture-of-experts models in PyTorch.

The public names load on first use, so that `import moefx` stays light (torch imports it for TORCH_LOGS and to list backends). No module
is named like one of them: importing it would hide the function.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["optimize", "plan", "report"]

if TYPE_CHECKING:
    from moefx.pipeline import optimize
    from moefx.planner import plan
    from moefx.reports import report

_HOMES = {"optimize": "moefx.pipeline", "plan": "moefx.planner", "report": "moefx.reports"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'moefx' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
