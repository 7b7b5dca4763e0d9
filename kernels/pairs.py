"""The (token, k) pairs of a rank, sorted by expert: what every layout begins with."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Pairs(NamedTuple):
    """`pair` [R] is t * K + k, `expert` [R] its local expert, ascending; `rank` [R] its place among the expert's; `counts` [E]."""

    pair: torch.Tensor
    expert: torch.Tensor
    rank: torch.Tensor
    counts: torch.Tensor


def by_expert(ids: torch.Tensor, first: int, experts: int) -> Pairs:
    """The pairs of ids [T, K] whose expert is in [first, first + experts)."""
    flat = ids.reshape(-1) - first
    order = torch.argsort(flat, stable=True)
    local = flat[order]
    keep = (local >= 0) & (local < experts)
    order, local = order[keep], local[keep]
    counts = torch.bincount(local, minlength=experts)
    rank = torch.arange(local.numel(), device=ids.device) - (torch.cumsum(counts, 0) - counts)[local]
    return Pairs(order, local, rank, counts)
