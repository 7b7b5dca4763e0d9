"""What happened to each layer, for people and for programs."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

import moefx
from moefx.decision import Decision, expert_bytes
from moefx.layer import Layer
from moefx.options import Options

REPORT_KEY = "_moefx_report"


@dataclass
class LayerRecord:
    """One layer. `layer` and `decision` are None where the trace did not get that far; `check` is the design's object.

    `packed_bytes`: memory taken by repacked weights; `freed_bytes`: of parameters that live on in them alone (`inplace=True`);
    `kept_bytes`: of those that lie beside them all the same, and `kept_because` why; `before`/`after`: graph text.
    """

    name: str
    rewritten: bool
    form: str | None = None
    reason: str | None = None
    layer: Layer | None = None
    decision: Decision | None = None
    check: dict[str, Any] = field(default_factory=lambda: {"ran": False})
    rounding: str | None = None
    opaque_reason: str | None = None
    seconds: float = 0.0
    packed_bytes: int = 0
    freed_bytes: int = 0
    kept_bytes: int = 0
    kept_because: str | None = None
    before: str = ""
    after: str = ""

    def to_json(self) -> dict[str, Any]:
        layer, decision = self.layer, self.decision
        found: dict[str, Any] = {"name": self.name, "rewritten": self.rewritten, "form": self.form, "reason": self.reason}
        if layer is None:
            return {
                **found,
                "dims": {},
                "activation": {},
                "experts": {"kernel": None, "candidates": []},
                "shared_expert": {"present": False},
                "check": self.check,
            }
        experts = decision.E if decision else layer.E_total
        found["dims"] = {"E_total": layer.E_total, "E": experts, "D": layer.D, "G": layer.D // 128, "H": layer.H, "K": layer.K}
        found["activation"] = {**layer.activation.to_json(), "rounding": self.rounding, "opaque_reason": self.opaque_reason}
        found["experts"] = decision.experts_json() if decision else {"kernel": None, "candidates": []}
        if not self.rewritten:
            found["experts"]["kernel"] = None
        shared = layer.shared
        found["shared_expert"] = {
            "present": shared is not None,
            "gate": shared.gate if shared else None,
            "placement": decision.placement if decision and shared else None,
            "reason": decision.placement_reason if decision and shared else None,
        }
        if decision and decision.shared_slot is not None:
            found["shared_expert"]["predicates"] = decision.shared_slot.to_json()["predicates"]
        found |= {
            "check": self.check,
            "seconds": round(self.seconds, 3),
            "packed_bytes": self.packed_bytes,
            "freed_bytes": self.freed_bytes,
            "kept_bytes": self.kept_bytes,
            "kept_because": self.kept_because,
            "count": layer.count,
            "expert_bytes_per_rank": _times(expert_bytes(layer, decision), layer.count) if decision else None,
            "dtype": layer.dtype,
        }
        if decision and decision.warnings:
            found["warnings"] = list(decision.warnings)
        return found


def _times(each: int | None, count: int) -> int | None:
    return None if each is None else each * count


class Report:
    """`.layers` and `.skipped` as the JSON has them, `.to_text()`, `.to_json()`, `.to_html(path)`."""

    def __init__(self, options: Options, records: Sequence[LayerRecord], skipped: Sequence[dict[str, str]] = (), title: str = ""):
        self.options, self.records, self.title = options, list(records), title
        self.skipped = [dict(s) for s in skipped]

    @property
    def layers(self) -> list[dict[str, Any]]:
        return [r.to_json() for r in self.records]

    def to_dict(self) -> dict[str, Any]:
        o = self.options
        return {
            "moefx": moefx.__version__,
            "model": self.title,
            "target": o.target,
            "ep_size": o.ep_size,
            "a2a": o.a2a,
            "precision": o.precision,
            "layers": self.layers,
            "skipped": self.skipped,
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, width: int = 140) -> str:
        """A table with one row for each kind of layer, then what stood in the way of better kernels."""
        from rich.console import Console

        buffer = io.StringIO()
        console = Console(file=buffer, width=width, force_terminal=False)
        console.print(_table(self))
        for line in _notes(self):
            console.print(line, highlight=False, soft_wrap=False)
        return buffer.getvalue()

    def to_html(self, path: str) -> None:
        from moefx.html import page

        with open(path, "w", encoding="utf-8") as file:
            file.write(page([self]))


def _table(report: Report) -> Any:
    from rich.table import Table

    o = report.options
    table = Table(
        title=f"moefx: {report.title or 'model'} | target {o.target}, ep_size {o.ep_size}, a2a {o.a2a}, precision {o.precision}",
        title_justify="left",
    )
    for column in ("layers", "form", "E", "D", "H", "K", "activation", "kernel", "shared expert", "GiB a rank", "check"):
        table.add_column(column)
    for count, record in _folded(report.records):
        j = record.to_json()
        if record.layer is None or not record.rewritten and record.decision is None:
            table.add_row(str(count), record.form or "-", "", "", "", "", "", "left alone", "", "", "")
            continue
        layer = record.layer
        table.add_row(
            str(count),
            layer.form,
            f"{j['dims']['E']} of {layer.E_total}",
            str(layer.D),
            str(layer.H),
            str(layer.K),
            _activation(record),
            kernel_text(record),
            _shared(j),
            _gib(j, count),
            _check(record),
        )
    return table


def _folded(records: Sequence[LayerRecord]) -> list[tuple[int, LayerRecord]]:
    kinds: dict[str, tuple[int, LayerRecord]] = {}
    for record in records:
        j = record.to_json()
        key = json.dumps(
            {k: j[k] for k in ("rewritten", "form", "reason", "dims", "activation", "experts", "shared_expert")}, sort_keys=True
        )
        count, first = kinds.get(key, (0, record))
        kinds[key] = (count + (record.layer.count if record.layer else 1), first)
    return list(kinds.values())


def kernel_text(record: LayerRecord) -> str:
    """The kernel that runs a layer, with its guard and its padding."""
    decision = record.decision
    if not record.rewritten or decision is None or decision.kernel is None:
        return "left alone"
    padded = " on padded " + ", ".join(f"{n} = {size}" for n, size in decision.pad.items()) if decision.pad else ""
    guard = f" if {decision.guard.strip('()')}, else {decision.otherwise.name}" if decision.otherwise else ""
    return f"{decision.kernel.name}{padded}{guard}"


def _activation(record: LayerRecord) -> str:
    assert record.layer is not None
    a = record.layer.activation
    limit = f" {a.clamp}-clamp {a.limit:g}" if a.limit is not None else ""
    return f"{a.kind}{limit}, {a.columns}"


def _shared(j: dict[str, Any]) -> str:
    s = j["shared_expert"]
    if not s["present"]:
        return "none"
    return f"{s['placement']}{', sigmoid gate' if s['gate'] else ''}"


def _gib(j: dict[str, Any], count: int) -> str:
    held = j.get("expert_bytes_per_rank")
    return f"{held / j['count'] * count / 2**30:.3g}" if held else ""


def _check(record: LayerRecord) -> str:
    c = record.check
    if not c.get("ran"):
        return "not run"
    return f"error {c['max_abs_error']:.1e}, relative {c['relative_error']:.1e} (allowed {c['tolerance']:.0e})"


def _notes(report: Report) -> list[str]:
    lines: list[str] = []
    for _, record in _folded(report.records):
        name = record.name or "(the module itself)"
        if record.reason:
            lines.append(f"{name}: {record.reason}")
        if record.opaque_reason:
            lines.append(f"{name}: activation kept as it was: {record.opaque_reason}")
        if record.decision is None:
            continue
        for outcome in record.decision.candidates:
            failed = outcome.first_failure()
            if failed is not None:
                sides = f": {failed.lhs} vs {failed.rhs}" if failed.lhs is not None else ""
                lines.append(
                    f"{name}: {outcome.kernel} {failed.status} by {failed.text}{sides}" + (f" ({failed.why})" if failed.why else "")
                )
        if record.decision.placement == "unfused" and record.decision.placement_reason:
            lines.append(f"{name}: shared expert unfused: {record.decision.placement_reason}")
        lines += [f"{name}: warning: {w}" for w in record.decision.warnings]
    lines += [f"{s['name']}: skipped: {s['reason']}" for s in report.skipped]
    packed = sum(r.packed_bytes for r in report.records)
    if packed:
        freed = sum(r.freed_bytes for r in report.records)
        where = f", {freed / 2**20:.1f} MiB of parameters freed" if freed else " beside the model's own"
        lines.append(f"repacked weights: {packed / 2**20:.1f} MiB{where}")
    for why in dict.fromkeys(r.kept_because for r in report.records if r.kept_because):
        kept = sum(r.kept_bytes for r in report.records if r.kept_because == why)
        lines.append(f"inplace=True freed nothing of {kept / 2**20:.1f} MiB of parameters beside repacked weights: {why}")
    return list(dict.fromkeys(lines))


def report(model: nn.Module) -> Report:
    """The report of a model that `optimize` returned or that torch.compile ran with backend "moefx" (what was compiled so far).

    TypeError for what is no module, ValueError for one that was not optimised.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"report expects a torch.nn.Module, got {type(model).__name__}")
    inner = model.__dict__.get("_modules", {}).get("_orig_mod", model)
    found = inner.__dict__.get(REPORT_KEY) or _of_compiled(inner)
    if found is None:
        raise ValueError("this model was not optimised by moefx; pass what moefx.optimize(model) returned, or run the compiled model once")
    return found


def _of_compiled(model: nn.Module) -> Report | None:
    """The latest record of every layer of the model that the torch.compile backend saw."""
    import sys

    backend: Any = sys.modules.get("moefx.backend")
    own = {id(p) for p in model.parameters()}
    seen = [(o, r) for weight, o, r in (backend.RECORDS if backend else []) if id(weight()) in own]
    if not seen:
        return None
    latest = {record.name: record for _, record in seen}
    return Report(seen[-1][0], list(latest.values()), (), type(model).__name__)
