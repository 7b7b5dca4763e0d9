"""Private and version-dependent imports of torch and transformers, in one place."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Iterator
from typing import Any

from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["ShapeEnv", "quiet_export_logs", "router_logits_wanted", "without_fake_mode"]


def router_logits_wanted() -> bool:
    """Whether transformers is collecting router logits in this call (it hooks the router, which a rewritten block does not call)."""
    capturing: Any = sys.modules.get("transformers.utils.output_capturing")
    if capturing is None:
        return False
    return "router_logits" in (capturing._active_collector.get() or ())


@contextlib.contextmanager
def without_fake_mode() -> Iterator[None]:
    """Real tensors inside a trace."""
    with unset_fake_temporarily(), _disable_current_modes():
        yield


@contextlib.contextmanager
def quiet_export_logs() -> Iterator[None]:
    """Export's own error logs and prints off: a trace that fails is an answer here, and its text goes into the report."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)
