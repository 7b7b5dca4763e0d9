"""Named expert activations and their plain-PyTorch meaning.

| kind | formula (g gate, u up, L limit) |
|---|---|
| swiglu | silu(g) * u |
| swiglu, clamp "pre" | silu(min(g, L)) * clamp(u, -L, L) |
| swiglu, clamp "post" | min(silu(g), L) * clamp(u, -L, L) |
| swiglu_oai | min(g, L) * sigmoid(alpha * min(g, L)) * (clamp(u, -L, L) + beta) |
| geglu, geglu_tanh | gelu(g) * u, exact or tanh approximation |
| relu2, silu | relu(x)^2, silu(x): no gate |
| opaque | kept as the graph had it |
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F

CLAMPS = {"swiglu": ("pre", "post"), "swiglu_oai": ("pre",)}
KINDS = ("swiglu", "swiglu_oai", "geglu", "geglu_tanh", "relu2", "silu", "opaque")
COLUMNS = ("concat", "concat_up_first", "interleaved", "interleaved_up_first", "separate")


@dataclass(frozen=True)
class Activation:
    """One named activation. `columns` says where gate and up lie in the 2D columns of the gate_up product.

    "separate" means that the model had two GEMMs; their product is then laid out as "concat". `clamp` is None, "pre" or "post"; `limit`
    is None without a clamp. Ungated kinds have D columns and ignore `columns`.
    """

    kind: str
    columns: str = "concat"
    limit: float | None = None
    clamp: str | None = None
    alpha: float = 1.0
    beta: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"activation kind {self.kind!r} is unknown; choose one of {', '.join(KINDS)}")
        # Kernels hold these fields as numbers: what the formula does not read would change their results.
        if self.clamp is not None and self.kind in CLAMPS and self.clamp not in CLAMPS[self.kind]:
            raise ValueError(f"clamp {self.clamp!r} of {self.kind} is unknown; choose None or one of {', '.join(CLAMPS[self.kind])}")
        if (self.clamp is None) != (self.limit is None):
            raise ValueError(f"clamp {self.clamp!r} with limit {self.limit!r}: give both, or neither")
        if self.kind != "swiglu_oai" and (self.alpha, self.beta) != (1.0, 0.0):
            raise ValueError(f"alpha {self.alpha:g} and beta {self.beta:g} belong to swiglu_oai, not to {self.kind}: leave them 1 and 0")
        if self.columns not in COLUMNS:
            raise ValueError(f"column order {self.columns!r} is unknown; choose one of {', '.join(COLUMNS)}")

    @property
    def gated(self) -> bool:
        return self.kind not in ("relu2", "silu")

    def formula(self) -> str:
        """The kind with its constants, without clamp and column order."""
        return self.kind if (self.alpha, self.beta) == (1.0, 0.0) else f"{self.kind}(alpha={self.alpha:g}, beta={self.beta:g})"

    def to_json(self) -> dict[str, Any]:
        """The design's JSON object."""
        return asdict(self)

    def encode(self) -> str:
        """A string an op schema can carry; `decode` reads it back."""
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    @functools.cache
    def decode(text: str) -> Activation:
        return Activation(**json.loads(text))

    def split(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of gate and up, each [..., D], of h [..., 2D]."""
        if self.columns.startswith("interleaved"):
            first, second = h[..., 0::2], h[..., 1::2]
        else:
            first, second = h.chunk(2, dim=-1)
        return (second, first) if self.columns.endswith("up_first") else (first, second)

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        """h [..., 2D] (gated) or [..., D] -> [..., D] of the same dtype, computed in h's dtype with no cast of its own."""
        if self.kind == "relu2":
            return F.relu(h).square()
        if self.kind == "silu":
            return F.silu(h)
        gate, up = self.split(h)
        if self.kind == "geglu":
            return F.gelu(gate) * up
        if self.kind == "geglu_tanh":
            return F.gelu(gate, approximate="tanh") * up
        if self.kind == "swiglu_oai":
            if self.limit is not None:
                gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
            return gate * torch.sigmoid(gate * self.alpha) * (up + self.beta)
        if self.kind == "swiglu":
            if self.limit is None:
                return F.silu(gate) * up
            if self.clamp == "pre":
                return F.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)
            return F.silu(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)
        raise ValueError("an opaque activation has no formula of its own: it stays in the graph")
