"""FP8 (e4m3) quantisation: 128x128 blocks for weights, groups of 128 columns for activations, UE8M0 scales and their packing.

scale = max(amax, 1e-10) / 448 and q = e4m3(x / scale), so that the largest value of a block maps to e4m3's largest, 448. A UE8M0 scale
is a power of two, rounded UP, stored as its biased exponent in one byte; four groups share an int32, the first in the lowest byte.
Ragged edges (sizes that are no multiples of 128) get a block of their own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

BLOCK = 128
E4M3_MAX = 448.0
AMAX_FLOOR = 1e-10
E4M3 = torch.float8_e4m3fn


def quantize_blocks(weight: torch.Tensor, ue8m0: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """[.., N, K] -> (e4m3 [.., N, K], fp32 scales [.., ceil(N/128), ceil(K/128)], powers of two with `ue8m0`)."""
    *lead, n, k = weight.shape
    rows, columns = -(-n // BLOCK), -(-k // BLOCK)
    padded = F.pad(weight.float(), (0, columns * BLOCK - k, 0, rows * BLOCK - n))
    blocks = padded.view(*lead, rows, BLOCK, columns, BLOCK)
    scales = blocks.abs().amax((-3, -1)).clamp_min(AMAX_FLOOR) / E4M3_MAX
    scales = round_up_to_power_of_two(scales) if ue8m0 else scales
    quantized = (blocks / scales[..., :, None, :, None]).to(E4M3).view(*lead, rows * BLOCK, columns * BLOCK)
    return quantized[..., :n, :k].contiguous(), scales


def dequantize_blocks(quantized: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The fp32 weight [.., N, K] that `quantize_blocks` stands for."""
    n, k = quantized.shape[-2:]
    wide = scales.repeat_interleave(BLOCK, -2)[..., :n, :].repeat_interleave(BLOCK, -1)[..., :k]
    return quantized.float() * wide


def group_scales(x: torch.Tensor, ue8m0: bool = False) -> torch.Tensor:
    """fp32 scales [.., ceil(K/128)] of x [.., K], computed in fp32."""
    groups = -(-x.shape[-1] // BLOCK)
    padded = F.pad(x.float(), (0, groups * BLOCK - x.shape[-1])).unflatten(-1, (groups, BLOCK))
    scales = padded.abs().amax(-1).clamp_min(AMAX_FLOOR) / E4M3_MAX
    return round_up_to_power_of_two(scales) if ue8m0 else scales


def quantize_groups(x: torch.Tensor, ue8m0: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """[.., K] -> (e4m3 [.., K], fp32 scales [.., ceil(K/128)])."""
    scales = group_scales(x, ue8m0)
    wide = scales.repeat_interleave(BLOCK, -1)[..., : x.shape[-1]]
    return (x.float() / wide).to(E4M3), scales


def dequantize_groups(quantized: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The fp32 activations [.., K] that `quantize_groups` stands for."""
    return quantized.float() * scales.repeat_interleave(BLOCK, -1)[..., : quantized.shape[-1]]


def exponents(scales: torch.Tensor) -> torch.Tensor:
    """UE8M0 bytes (int32, 0..254) of positive fp32 scales: the biased exponent of the next power of two not below."""
    bits = scales.contiguous().view(torch.int32)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)


def round_up_to_power_of_two(scales: torch.Tensor) -> torch.Tensor:
    """The fp32 value of the UE8M0 scale."""
    return (exponents(scales) << 23).view(torch.float32)


def pack_ue8m0(scales: torch.Tensor) -> torch.Tensor:
    """Power-of-two scales [E, N, G] (G % 4 == 0; 0 for unused rows) -> int32 [E, N, G/4], stored as [E, G/4, N]."""
    codes = exponents(scales).unflatten(-1, (-1, 4))
    shifts = torch.tensor([0, 8, 16, 24], dtype=torch.int32, device=scales.device)
    packed = (codes << shifts).sum(-1, dtype=torch.int32)
    return packed.transpose(1, 2).contiguous().transpose(1, 2)


def unpack_ue8m0(packed: torch.Tensor) -> torch.Tensor:
    """int32 [E, N, G/4] -> fp32 scales [E, N, G]."""
    shifts = torch.tensor([0, 8, 16, 24], dtype=torch.int32, device=packed.device)
    codes = ((packed.unsqueeze(-1) >> shifts) & 0xFF).flatten(-2)
    return (codes << 23).view(torch.float32)
