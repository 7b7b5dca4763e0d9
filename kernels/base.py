"""What a kernel family declares next to its code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from moefx.contract import Contract

Packed = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True)
class Kernel:
    """One way to run `moefx.experts`.

    pack(w13, b13, w2, b2, activation) -> what `op` takes after (x, ids, weights); a pure function of tensors.
    op(x [T, H], ids [T, K], weights [T, K], *packed, activation, first) -> [T, H]: the meaning of `moefx.experts`.
    reference: the same call in plain PyTorch with the same quantisation. `lossy`: the numbers are those of a lower precision;
    `packs`: pack makes new tensors, so weights must be packed before a call (not where a graph is compiled as it stands).
    """

    name: str
    contract: Contract
    pack: Callable[..., Packed]
    op: Callable[..., torch.Tensor]
    reference: Callable[..., torch.Tensor]
    lossy: bool = False
    packs: bool = False

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
