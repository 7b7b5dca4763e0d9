"""Choose the kernel and the placement of the shared expert together, from contracts alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moefx.contract import Derived, Outcome, Range
from moefx.kernels.base import Kernel
from moefx.kernels.cpu import build
from moefx.layer import Layer
from moefx.options import Options
from moefx.placement import shared_slot, slots, why_unfused
from moefx.prove import align

ASSUMED_TOKENS = 64  # of estimates, where the tokens of a call are not known
_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
MASKED_ROWS = 128  # rows per expert in the masked layout are padded to a multiple of this (the GEMM's tile on a GPU)


@dataclass(frozen=True)
class Decision:
    """What runs one layer. `kernel` is None when no candidate holds (then `reason` says so).

    `pad`: sizes that D and H are padded to with zeros. `guard`: the run-time condition on T under which `kernel` runs; else `otherwise`.
    """

    kernel: Kernel | None
    reason: str | None
    placement: str | None
    slots: int
    placement_reason: str | None
    candidates: tuple[Outcome, ...]
    E: int
    warnings: tuple[str, ...] = field(default=())
    pad: Mapping[str, int] = field(default_factory=dict)
    guard: str = ""
    otherwise: Kernel | None = None
    shared_slot: Outcome | None = None

    def experts_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"kernel": self.kernel.name if self.kernel else None, "candidates": [c.to_json() for c in self.candidates]}
        if self.pad:
            found["pad"] = dict(self.pad)
        if self.guard and self.otherwise is not None:
            found |= {"guard": self.guard, "otherwise": self.otherwise.name}
        return found


@dataclass(frozen=True)
class _Choice:
    """One way to run the experts: a kernel, with the shared expert as slots or not, on padded sizes or not."""

    kernel: Kernel
    outcome: Outcome
    fused: bool
    pad: Mapping[str, int] = field(default_factory=dict)


def decide(layer: Layer, options: Options, guards: bool = True) -> Decision:
    """Kernel, placement of the shared expert, repair and guard, from contracts alone.

    The first kernel in the registry's order whose contract is proved, with the shared expert as slots when that is proved too. A kernel
    in front of it that holds for some numbers of tokens runs under a guard; one that holds on padded sizes runs when the estimate of
    bytes moved is below the fallback's. `guards=False`: no run-time dispatch. ValueError when the experts do not divide over the ranks.
    """
    check_divides(layer.E_total, options.ep_size)
    experts = layer.E_total // options.ep_size
    unfused = why_unfused(layer, options) if layer.shared is not None else None
    slot = shared_slot(layer, options) if layer.shared is not None else None
    extra = slots(layer) if layer.shared is not None and unfused is None else 0
    choices = _choices(layer, options, experts, extra, guards)
    outcomes = tuple(c.outcome for c in choices)
    placed = None if layer.shared is None else "unfused"
    best = _best(choices)
    if best is None:
        reason = "no kernel holds: " + "; ".join(_why_not(o) for o in outcomes) if outcomes else "every kernel is disabled"
        return Decision(None, reason, placed, 0, None, outcomes, experts, _warnings(options, None), shared_slot=slot)
    chosen, otherwise = best
    why = unfused
    if extra and chosen.fused:
        placed, slot_text = "fused", f"{extra} slot{'s' if extra > 1 else ''}"
        why = f"fused into {slot_text}: the contract of {chosen.kernel.name} holds with E = {experts + extra}"
    elif extra:
        why = next((refusal(c.outcome) for c in choices if c.kernel is chosen.kernel and c.fused), None)
    return Decision(
        chosen.kernel,
        None,
        placed,
        extra if chosen.fused else 0,
        why,
        outcomes,
        experts,
        _warnings(options, chosen.kernel),
        chosen.pad,
        chosen.outcome.guard(),
        otherwise.kernel if otherwise else None,
        slot,
    )


def _choices(layer: Layer, options: Options, experts: int, extra: int, guards: bool) -> list[_Choice]:
    """Every candidate in order of preference: each kernel with slots, without, and the same on padded sizes where it fails as it is."""
    from moefx.kernels.registry import KERNELS

    found: list[_Choice] = []
    for kernel in KERNELS:
        if not is_candidate(kernel, layer, options):
            continue
        for slot_count in (extra, 0) if extra else (0,):
            known = facts(layer, options, experts + slot_count, slot_count)
            suffix = "+shared" if slot_count else ""
            outcome = replace(kernel.contract.evaluate(known, suffix, guards), bytes_moved=bytes_moved(kernel, known))
            found.append(_Choice(kernel, outcome, slot_count > 0))
            sizes = _padded(kernel, known)
            if outcome.status in ("refuted", "unknown") and sizes and "pad_experts" not in options.disable:
                repaired = {**known, **sizes, "G": sizes.get("D", layer.D) // 128}
                text = ", ".join(f"{n} {known[n]} -> {size}" for n, size in sizes.items())
                outcome = kernel.contract.evaluate(repaired, suffix + "+pad")
                outcome = replace(outcome, repair=f"zeros: {text}", bytes_moved=bytes_moved(kernel, repaired, known))
                found.append(_Choice(kernel, outcome, slot_count > 0, sizes))
    return found


def _why_not(outcome: Outcome) -> str:
    return refusal(outcome) or f"{outcome.kernel} holds only for {outcome.guard()}, and no other kernel is proved for the other sizes"


def _padded(kernel: Kernel, known: Mapping[str, Any]) -> dict[str, int]:
    """The sizes the kernel's pads change."""
    sizes: dict[str, int] = {}
    for pad in kernel.contract.pads:
        size = align(known[pad.dim], pad.multiple)
        if size != known[pad.dim]:
            sizes[pad.dim] = size
    return sizes


def _best(choices: Sequence[_Choice]) -> tuple[_Choice, _Choice | None] | None:
    """(what runs, what runs when its guard fails)."""
    fallback = next((c for c in choices if c.outcome.status == "proved" and not c.pad), None)
    for choice in choices:
        if choice is fallback:
            break
        if choice.pad and choice.outcome.status == "proved" and (fallback is None or _cheaper(choice, fallback)):
            return choice, None
        otherwise = next((c for c in choices if c.fused == choice.fused and c.outcome.status == "proved" and not c.pad), None)
        if choice.outcome.status == "guarded" and otherwise is not None:
            return choice, otherwise
    return (fallback, None) if fallback is not None else None


def _cheaper(choice: _Choice, fallback: _Choice) -> bool:
    assert choice.outcome.bytes_moved is not None and fallback.outcome.bytes_moved is not None
    return choice.outcome.bytes_moved < fallback.outcome.bytes_moved


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
        "N": Derived(f"max({MASKED_ROWS}, align(T, {MASKED_ROWS}))"),
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
        "limit": layer.activation.limit,
        "columns": layer.activation.columns,
        "bias": layer.bias,
        "target": options.target,
        "precision": options.precision,
        "a2a": options.a2a,
        **({"isa": build.planned_isa()} if options.target == "cpu" else {}),
    }


def bytes_moved(kernel: Kernel, known: Mapping[str, Any], unpadded: Mapping[str, Any] | None = None) -> int:
    """An estimate of the bytes one call reads and writes: weights of the experts hit, rows in and out, what lies between the GEMMs.

    For the tokens of a call when they are known, else `ASSUMED_TOKENS`. `unpadded`: the sizes before a repair, whose rows are copied.
    """
    tokens = known["T"] if isinstance(known["T"], int) else ASSUMED_TOKENS
    rows = tokens * known["K"]
    products = 2 if known["activation"] in ("relu2", "silu") else 3
    stored = kernel.weight_bytes or _BYTES.get(str(known["weight_format"]), 2)
    moved = min(known["E"], rows) * products * known["D"] * known["H"] * stored
    moved += rows * (2 * known["H"] * _BYTES.get(str(known["dtype"]), 2) + kernel.row_bytes * known["D"])
    if unpadded is not None and unpadded["H"] != known["H"]:
        moved += 2 * tokens * (known["H"] + unpadded["H"]) * _BYTES.get(str(known["dtype"]), 2)
    return moved


def expert_bytes(layer: Layer, decision: Decision) -> int | None:
    """Bytes of expert weights one rank holds of one layer: routed experts and slots as the kernel stores them, a separate shared expert as
    the model does; FP8 scales of 128x128 blocks included, biases not. None for a storage moefx does not know."""
    stored = (decision.kernel.weight_bytes if decision.kernel else None) or _BYTES.get(layer.weight_format)
    if stored is None:
        return None
    hidden, width = decision.pad.get("H", layer.H), decision.pad.get("D", layer.D)
    matrices = 3 if layer.activation.gated else 2
    scales = 4 * align(hidden, 128) * align(width, 128) // 128**2 if stored == 1 else 0
    held = (decision.E + decision.slots) * matrices * (hidden * width * stored + scales)
    if layer.shared is not None and decision.placement != "fused":
        held += matrices * layer.shared.D * layer.H * _BYTES.get(layer.shared.weight_format, 2)
    return held


def refusal(outcome: Outcome) -> str | None:
    """What stood in the way of a candidate, in a line."""
    failed = outcome.first_failure()
    if failed is None:
        return None
    values = ", ".join(f"{k} = {v}" for k, v in failed.values.items())
    sides = f" ({failed.lhs} vs {failed.rhs})" if failed.lhs is not None else ""
    return f"{outcome.kernel} is {failed.status}: {failed.text}{sides} with {values}"


def _warnings(options: Options, kernel: Kernel | None) -> tuple[str, ...]:
    found: tuple[str, ...] = ()
    if options.a2a == "deepep" and options.target.startswith("gfx"):
        found += (f"a2a='deepep' on {options.target} is unusual: DeepEP is built for NVIDIA GPUs",)
    if options.a2a == "deepep" and options.target == "cpu":
        found += ("a2a='deepep' on a CPU is unusual: DeepEP moves tokens between GPUs; here torch.distributed stands in for it",)
    if kernel is not None and options.precision != "preserve" and not kernel.lossy:
        text = f"no kernel for precision {options.precision!r} holds on {options.target}: {kernel.name} runs in the model's own precision"
        found += (text,)
    return found
