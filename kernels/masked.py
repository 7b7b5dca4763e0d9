"""The masked layout: a block of N rows for every expert of the rank, `masked_m` valid ones in front. Used by masked grouped GEMMs.

N is the number of tokens, or of the fullest expert's rows where tokens name an expert twice, rounded up to 128: no expert overflows its
block, a GEMM tile never reaches the next expert, and the sum of `masked_m` never exceeds N * K.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moefx.kernels import fp8
from moefx.kernels.pairs import by_expert
from moefx.prove import align

ROWS = 128


@dataclass(frozen=True)
class Layout:
    """`slot` [R] is the place (expert * N + row) of each of the rank's (token, k) pairs, `pair` [R] its t * K + k, ascending per expert."""

    masked_m: torch.Tensor
    slot: torch.Tensor
    pair: torch.Tensor
    rows: int

    def valid(self) -> torch.Tensor:
        """[E, N, 1]: which rows hold a pair."""
        return (torch.arange(self.rows, device=self.masked_m.device) < self.masked_m.unsqueeze(1)).unsqueeze(-1)


def layout(ids: torch.Tensor, first: int, experts: int) -> Layout:
    """The layout of ids [T, K] on a rank that owns [first, first + experts)."""
    pairs = by_expert(ids, first, experts)
    rows = max(ROWS, align(max(ids.shape[0], int(pairs.counts.max()) if experts else 0), ROWS))
    return Layout(pairs.counts.to(torch.int32), pairs.expert * rows + pairs.rank, pairs.pair, rows)


def scatter(x: torch.Tensor, at: Layout, top_k: int) -> torch.Tensor:
    """x [T, H] -> [E, N, H]; rows past masked_m are zero."""
    experts = at.masked_m.shape[0]
    out = torch.zeros(experts * at.rows, x.shape[1], dtype=x.dtype, device=x.device)
    out[at.slot] = x[torch.div(at.pair, top_k, rounding_mode="floor")]
    return out.view(experts, at.rows, -1)


def combine(y: torch.Tensor, weights: torch.Tensor, at: Layout) -> torch.Tensor:
    """y [E, N, H], weights [T, K] -> [T, H]: the weighted sum of each token's rows, in fp32, in y's dtype."""
    tokens, top_k = weights.shape
    rows = y.reshape(-1, y.shape[-1])[at.slot].float() * weights.reshape(-1)[at.pair, None].float()
    out = torch.zeros(tokens, y.shape[-1], device=y.device)
    return out.index_add_(0, torch.div(at.pair, top_k, rounding_mode="floor"), rows).to(y.dtype)


def gemm(
    a: torch.Tensor, a_scales: torch.Tensor, w: torch.Tensor, w_scales: torch.Tensor, masked_m: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Masked FP8 GEMM: a e4m3 [E, M, K] with scales [E, M, ceil(K/128)], w e4m3 [E, N, K] with block scales -> [E, M, N] in `dtype`.

    fp32 accumulation of the dequantised operands; rows past masked_m are zero.
    """
    out = torch.zeros(a.shape[0], a.shape[1], w.shape[1], dtype=dtype, device=a.device)
    for e, m in enumerate(masked_m.tolist()):
        if m:
            rows = fp8.dequantize_groups(a[e, :m], a_scales[e, :m])
            out[e, :m] = (rows @ fp8.dequantize_blocks(w[e], w_scales[e]).t()).to(dtype)
    return out
