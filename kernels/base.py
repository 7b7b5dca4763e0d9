"""What a kernel family declares next to its code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from moefx import ops
from moefx.contract import Contract
from moefx.prove import compiled, parse, truth

Packed = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True)
class Kernel:
    """One way to run `moefx.experts`.

    pack(w13, b13, w2, b2, activation) -> what `op` takes after (x, ids, weights); a pure function of tensors.
    op(x [T, H], ids [T, K], weights [T, K], *packed, activation, first) -> [T, H]: the meaning of `moefx.experts`.
    reference: the same call in plain PyTorch with the same quantisation. `lossy`: the numbers are those of a lower precision.
    weight_bytes: of one packed weight (None: the model's own type); row_bytes: written and read per row and intermediate column between
    the two GEMMs. Both serve estimates alone.
    unpack(packed, H, D, activation) -> (w13, b13, w2, b2), bit for bit; None where packing rounds.
    packs: pack makes new tensors, so weights must be packed before a call (not where a graph is compiled as it stands).
    joins: pack takes lists in the place of tensors, joined along the experts, and makes no copy of the whole; the experts are the first
    dimension of all it makes.
    """

    name: str
    contract: Contract
    pack: Callable[..., Packed]
    op: Callable[..., torch.Tensor]
    reference: Callable[..., torch.Tensor]
    lossy: bool = False
    weight_bytes: int | None = None
    row_bytes: int = 12
    packs: bool = False
    joins: bool = False
    unpack: Callable[[Packed, int, int, str], Packed] | None = None

    def __reduce__(self) -> tuple[Callable[[str], Kernel], tuple[str]]:
        """Pickled by name: ops are looked up again where the kernel is loaded."""
        return _registered, (self.name,)


def _registered(name: str) -> Kernel:
    from moefx.kernels.registry import by_name

    return by_name(name)


def as_given(w13: Any, b13: Any, w2: Any, b2: Any, activation: str) -> Packed:
    """A pack that copies nothing."""
    del activation
    return w13, b13, w2, b2


def _guarded(guard, holds, otherwise, parts, x, ids, weights, packed, activation, first=0):
    taken = truth(_parsed(guard), {"T": x.shape[0]})
    own = packed[:parts] if taken else packed[parts:]
    return _registered(holds if taken else otherwise).op(x, ids, weights, *own, activation, first)


@cache
def _parsed(guard: str) -> Any:
    return compiled(parse(guard))


guarded = ops.define(
    "experts_guarded(str guard, str holds, str otherwise, int parts, Tensor x, Tensor ids, Tensor weights, Tensor?[] packed, "
    "str activation, int first=0) -> Tensor",
    _guarded,
    lambda guard, holds, otherwise, parts, x, ids, weights, packed, activation, first=0: torch.empty_like(x),
)
"""A run-time dispatch between two proved kernels, without recompiling: the experts op by the kernel named `holds` where `guard` is true of
T = x.shape[0], else by `otherwise`. `packed`: the `parts` packed tensors of the first kernel, then those of the second."""
