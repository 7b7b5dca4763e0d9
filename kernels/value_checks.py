"""Conditions on values that kernels can't check themselves: checked at every call with MOEFX_CHECK_VALUES=1 (or `ON` set), else never.

Off they cost one test of a module attribute. On a GPU a check waits for the device.
"""

from __future__ import annotations

import os

from moefx.errors import ValueCheckError

ON = os.environ.get("MOEFX_CHECK_VALUES", "") not in ("", "0")


def require(holds: bool, condition: str, values: str) -> None:
    """ValueCheckError, with the condition and the values, unless it holds."""
    if not holds:
        raise ValueCheckError(f"{condition} fails: {values}; the kernel would compute wrong numbers silently")
