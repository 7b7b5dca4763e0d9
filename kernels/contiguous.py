"""The contiguous layout: the rows of all experts in one matrix [M, .], each expert's padded to the GEMM's alignment with rows of id -1."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moefx.kernels import value_checks
from moefx.kernels.pairs import by_expert


@dataclass(frozen=True)
class Layout:
    """`ids` [M] int32: local expert of a row, -1 for padding; `row` [R]: the row of each of the rank's pairs, `pair` [R] its t * K + k."""

    ids: torch.Tensor
    row: torch.Tensor
    pair: torch.Tensor
    alignment: int

    @property
    def rows(self) -> int:
        return self.ids.shape[0]


def layout(ids: torch.Tensor, first: int, experts: int, alignment: int) -> Layout:
    """The layout of ids [T, K] on a rank that owns [first, first + experts)."""
    pairs = by_expert(ids, first, experts)
    padded = (pairs.counts + alignment - 1) // alignment * alignment
    row = (torch.cumsum(padded, 0) - padded)[pairs.expert] + pairs.rank
    owners = torch.full((int(padded.sum()),), -1, dtype=torch.int32, device=ids.device)
    owners[row] = pairs.expert.to(torch.int32)
    return Layout(owners, row, pairs.pair, alignment)


def scatter(x: torch.Tensor, at: Layout, top_k: int) -> torch.Tensor:
    """x [T, H] -> [M, H]; padding rows are zero."""
    out = torch.zeros(at.rows, x.shape[1], dtype=x.dtype, device=x.device)
    out[at.row] = x[torch.div(at.pair, top_k, rounding_mode="floor")]
    return out


def combine(y: torch.Tensor, weights: torch.Tensor, at: Layout) -> torch.Tensor:
    """y [M, H], weights [T, K] -> [T, H]: the weighted sum of each token's rows, in fp32, in y's dtype."""
    tokens, top_k = weights.shape
    rows = y[at.row].float() * weights.reshape(-1)[at.pair, None].float()
    out = torch.zeros(tokens, y.shape[-1], device=y.device)
    return out.index_add_(0, torch.div(at.pair, top_k, rounding_mode="floor"), rows).to(y.dtype)


def check(at: Layout, alignment: int) -> None:
    """Value checks of the layout: every group starts at a multiple of the alignment the library has now."""
    if not value_checks.ON:
        return
    change = torch.nonzero((at.ids[1:] != at.ids[:-1]) & (at.ids[1:] >= 0)).reshape(-1) + 1
    value_checks.require(
        bool((change % alignment == 0).all()), f"group_start % {alignment} == 0", f"groups start at rows {change.tolist()}"
    )
