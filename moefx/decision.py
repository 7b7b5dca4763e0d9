"""Choose the kernel and the placement of the shared expert together, from contracts alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from moefx.contract import Outcome, Range
from moefx.kernels.base import Kernel
from moefx.kernels.cpu import build
from moefx.layer import Layer
from moefx.options import Options
from moefx.placement import slots, why_unfused

MASKED_ROWS = 128  # rows per expert in the masked layout are padded to a multiple of this (the GEMM's tile on a GPU)


@dataclass(frozen=True)
class Decision:
    """What runs one layer. `kernel` is None when no candidate holds (then `reason` says so)."""

    kernel: Kernel | None
    reason: str | None
    placement: str | None
    slots: int
    placement_reason: str | None
    candidates: tuple[Outcome, ...]
    E: int
    warnings: tuple[str, ...] = field(default=())

    def experts_json(self) -> dict[str, Any]:
        return {"kernel": self.kernel.name if self.kernel else None, "candidates": [c.to_json() for c in self.candidates]}


def decide(layer: Layer, options: Options) -> Decision:
    """The first kernel, in the registry's order, whose contract is proved for the rank's experts; with the shared expert as slots when
    that is proved too. ValueError when the experts do not divide over the ranks."""
    from moefx.kernels.registry import KERNELS

    check_divides(layer.E_total, options.ep_size)
    experts = layer.E_total // options.ep_size
    unfused = why_unfused(layer, options) if layer.shared is not None else None
    extra = slots(layer) if layer.shared is not None and unfused is None else 0
    outcomes: list[Outcome] = []
    chosen: tuple[Kernel, bool, str | None] | None = None
    for kernel in KERNELS:
        if not is_candidate(kernel, layer, options):
            continue
        fused = kernel.contract.evaluate(facts(layer, options, experts + extra, extra), "+shared") if extra else None
        plain = kernel.contract.evaluate(facts(layer, options, experts, 0))
        outcomes += [o for o in (fused, plain) if o is not None]
        if chosen is None and fused is not None and fused.status == "proved":
            chosen = kernel, True, None
        elif chosen is None and plain.status == "proved":
            chosen = kernel, False, _refusal(fused) if fused is not None else unfused
    warnings = _warnings(options)
    if chosen is not None and options.precision != "preserve" and not chosen[0].lossy:
        warnings += (
            f"no kernel for precision {options.precision!r} holds on {options.target}: {chosen[0].name} runs in the model's own precision",
        )
    if chosen is None:
        reason = "no kernel holds: " + "; ".join(_refusal(o) or "" for o in outcomes) if outcomes else "every kernel is disabled"
        return Decision(None, reason, "unfused" if layer.shared else None, 0, None, tuple(outcomes), experts, warnings)
    kernel, fuse, why = chosen
    placement = None if layer.shared is None else "fused" if fuse else "unfused"
    why = (
        f"fused into {extra} slot{'s' if extra > 1 else ''}: the contract of {kernel.name} holds with E = {experts + extra}"
        if fuse
        else why
    )
    return Decision(kernel, None, placement, extra if fuse else 0, why, tuple(outcomes), experts, warnings)


def check_divides(experts: int, ep_size: int) -> None:
    if ep_size > experts:
        raise ValueError(f"ep_size={ep_size} is more than the {experts} routed experts; use at most {experts} ranks")
    if experts % ep_size:
        fits = [n for n in range(1, experts + 1) if experts % n == 0 and n <= 2 * ep_size]
        raise ValueError(
            f"{experts} routed experts do not divide over ep_size={ep_size} ranks; ep_size could be one of {', '.join(map(str, fits))}"
        )


def is_candidate(kernel: Kernel, layer: Layer, options: Options) -> bool:
    """Whether the request is one the kernel answers; FP8 weights make the FP8 kernels candidates whatever the precision asked."""
    wanted = "fp8" if layer.weight_format == "float8_e4m3fn" and options.precision == "preserve" else options.precision
    return kernel.name not in options.disable and wanted in kernel.contract.precisions and options.target in kernel.contract.targets


def facts(layer: Layer, options: Options, experts: int, shared_slots: int) -> dict[str, Any]:
    return {
        "T": Range(0) if options.tokens is None else options.tokens,
        "N": Range(MASKED_ROWS, None, MASKED_ROWS) if options.tokens is None else max(1, -(-options.tokens // MASKED_ROWS)) * MASKED_ROWS,
        "K": layer.K + shared_slots,
        "H": layer.H,
        "D": layer.D,
        "E": experts,
        "E_total": layer.E_total,
        "G": layer.D // 128,
        "S": shared_slots,
        "ep_size": options.ep_size,
        "dtype": layer.dtype,
        "weight_format": layer.weight_format,
        "activation": layer.activation.kind,
        "clamp": layer.activation.clamp,
        "columns": layer.activation.columns,
        "bias": layer.bias,
        "target": options.target,
        "precision": options.precision,
        **({"isa": build.isa()} if options.target == "cpu" else {}),
    }


def _refusal(outcome: Outcome | None) -> str | None:
    failed = outcome.first_failure() if outcome is not None else None
    if outcome is None or failed is None:
        return None
    values = ", ".join(f"{k} = {v}" for k, v in failed.values.items())
    sides = f" ({failed.lhs} vs {failed.rhs})" if failed.lhs is not None else ""
    return f"{outcome.kernel} is {failed.status}: {failed.text}{sides} with {values}"


def _warnings(options: Options) -> tuple[str, ...]:
    if options.a2a == "deepep" and options.target.startswith("gfx"):
        return (f"a2a='deepep' on {options.target} is unusual: DeepEP is built for NVIDIA GPUs",)
    return ()
