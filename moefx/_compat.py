"""Private and version-dependent imports of torch and transformers, in one place."""
from __future__ import annotations

import sys
from typing import Any


def router_logits_wanted() -> bool:
    """Whether transformers is collecting router logits in this call (it hooks the router, which a rewritten block does not call)."""
    capturing: Any = sys.modules.get("transformers.utils.output_capturing")
    if capturing is None:
        return False
    return "router_logits" in (capturing._active_collector.get() or ())
