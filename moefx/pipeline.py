"""`moefx.optimize`: find the mixture-of-experts blocks of a model, rewrite each to the kernel the plan chose, check it, swap it in."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from moefx import discover, swap
from moefx.block_check import check_block
from moefx.capture import first_line
from moefx.decision import Decision, check_divides, decide
from moefx.discover import Candidate
from moefx.errors import NotRewrittenError
from moefx.graph import text
from moefx.options import A2A, PRECISIONS, TARGETS, Options, check_choice, check_disable, check_ep_size, resolve_a2a
from moefx.packs import WeightRef
from moefx.release import release, undo
from moefx.reports import REPORT_KEY, LayerRecord, Report
from moefx.rewrite import Lowered, Ranks, Traced, build_forward, lower, trace
from moefx.signature import signature


def optimize(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    ep_size: int = 1,
    group: Any = None,
    a2a: str = "auto",
    precision: str = "preserve",
    target: str | None = None,
    verify: bool = True,
    strict: bool = False,
    inplace: bool = False,
    disable: Sequence[str] = (),
) -> nn.Module:
    """A model with the same classes, parameters and calls whose mixture-of-experts blocks run on moefx kernels.

    model: an `nn.Module` in eval mode with real weights. example_inputs: arguments of one call of the model (tensor, tuple or dict), needed
    only when a block's own inputs can't be made up from its weights. ep_size, group, a2a: expert parallelism; without an initialised
    process group the ranks are virtual, in this process. precision: "preserve" never lowers it. target: where the kernels are meant to
    run, by default where the model is. verify: compare each rewritten block with the block as it was. strict: a layer that looks like
    MoE and is not rewritten raises NotRewrittenError. inplace: change and return `model` itself. disable: names of passes or kernels
    to leave out.

    Raises TypeError for what is no module and ValueError for values, before anything is changed. `moefx.report(result)` says what was
    done and why.
    """
    for name, flag in (("verify", verify), ("strict", strict), ("inplace", inplace)):
        if not isinstance(flag, bool):
            raise ValueError(f"{name}={flag!r} must be True or False")
    options, ranks = check_arguments(model, ep_size, group, a2a, precision, target, disable)
    if any(p.is_meta for p in model.parameters()):
        raise ValueError(
            "the model is on the meta device and has no weights to run; use moefx.plan(model) to plan it, or load its weights first"
        )
    if model.training:
        raise ValueError("the model is in training mode and moefx rewrites inference only; call model.eval() first")
    candidates = discover.find(model)
    for candidate in candidates:
        check_divides(candidate.experts, options.ep_size)
    examples = _example_calls(model, candidates, example_inputs) if example_inputs is not None else {}
    result = model if inplace else swap.copy_sharing_tensors(model)
    try:
        with torch.random.fork_rng(devices=[]):  # inputs are made up on the way
            records = _rewritten(result, candidates, options, ranks, examples, verify, inplace)
        _check_strict(strict, model, records, options)
    except BaseException:  # an interrupt too: the user's only copy of the model must not stay half rewritten
        if inplace:
            undo(model)
        raise
    skipped = [] if records else [{"name": type(model).__name__, "reason": "no mixture-of-experts layer was found"}]
    result.__dict__[REPORT_KEY] = Report(options, records, skipped, type(model).__name__)
    return result


def _rewritten(
    result: nn.Module,
    candidates: Sequence[Candidate],
    options: Options,
    ranks: Ranks | None,
    examples: Mapping[str, Mapping[str, Any]],
    verify: bool,
    inplace: bool,
) -> list[LayerRecord]:
    traces: dict[Hashable, Traced] = {}
    records = []
    for c in _shown(candidates):
        records.append(_guarded(result, c, options, ranks, examples.get(c.name), verify, traces))
        if inplace and records[-1].rewritten and records[-1].packed_bytes:
            _release(result, records[-1], ranks)
    return records


def _check_strict(strict: bool, model: nn.Module, records: Sequence[LayerRecord], options: Options) -> None:
    left = [r for r in records if not r.rewritten or _other_precision(r, options)]
    if not strict or (records and not left):
        return
    text = (
        "; ".join(f"{r.name or type(model).__name__}: {r.reason or _other_precision(r, options)}" for r in left)
        or "no mixture-of-experts layer was found"
    )
    raise NotRewrittenError(f"strict=True and not every layer was rewritten as asked: {text}")


def _other_precision(record: LayerRecord, options: Options) -> str | None:
    """That a layer runs in the model's own precision though a lower one was asked for; None when it does not."""
    kernel = record.decision.kernel if record.decision else None
    if kernel is None or kernel.lossy or options.precision == "preserve":
        return None
    return f"no kernel for precision {options.precision!r} holds: {kernel.name} runs in the model's own precision"


def _shown(candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """The candidates, with a progress bar where somebody watches a terminal."""
    if len(candidates) < 2 or not sys.stderr.isatty():
        yield from candidates
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        yield from progress.track(candidates, description="moefx: rewriting layers")


def _release(model: nn.Module, record: LayerRecord, ranks: Ranks | None) -> None:
    block = model.get_submodule(record.name)
    forward: swap.BlockForward = block.__dict__["forward"]
    assert forward.pack is not None and record.decision is not None and record.decision.kernel is not None
    held = sum(t.numel() * t.element_size() for t in (ref() for ref in forward.pack.sources))
    record.kept_because = "each process of a group keeps those of its own experts"
    if ranks is None:
        record.kept_because = release(model, block, forward, record.decision.kernel)
    record.freed_bytes, record.kept_bytes = (held, 0) if record.kept_because is None else (0, held)


def check_arguments(
    model: Any, ep_size: int, group: Any, a2a: str, precision: str, target: str | None, disable: Sequence[str]
) -> tuple[Options, Ranks | None]:
    """The options, resolved; every bad value raises here."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"moefx.optimize expects a torch.nn.Module, got {type(model).__name__}")
    if REPORT_KEY in model.__dict__ or swap.swapped(model):
        raise ValueError("the model is already optimised by moefx; pass the original model")
    check_ep_size(ep_size)
    check_choice("a2a", a2a, A2A)
    check_choice("precision", precision, PRECISIONS)
    if target is not None:
        check_choice("target", target, TARGETS)
    disabled = check_disable(disable)
    ranks = _ranks(group, ep_size)
    options = Options(
        ep_size, resolve_a2a(a2a, ep_size, ranks is not None), precision, target or target_of(model), disabled, ranks is not None
    )
    return options, ranks


def _ranks(group: Any, ep_size: int) -> Ranks | None:
    from moefx import parallel

    return parallel.ranks(group, ep_size)


def target_of(model: nn.Module) -> str:
    """The target the model's device stands for."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type != "cuda":
        return "cpu"
    if torch.version.hip:
        return "gfx950" if "gfx950" in torch.cuda.get_device_properties(device).gcnArchName else "gfx942"
    return "sm100" if torch.cuda.get_device_capability(device)[0] >= 10 else "sm90"


def trace_layers(model: nn.Module, options: Options) -> list[LayerRecord]:
    """The records `plan` shows for a module: traced and decided, nothing executed."""
    records = []
    for candidate in discover.find(model):
        traced = trace(candidate, options, None, execute=False)
        if isinstance(traced, LayerRecord) and candidate.inner is not None:
            inner = trace(candidate.inner, options, None, execute=False)
            traced = inner if isinstance(inner, Traced) else traced
        if isinstance(traced, LayerRecord):
            records.append(traced)
            continue
        decision = decide(traced.layer, options)
        records.append(_record(candidate.name, traced, decision, decision.kernel is not None))
    return records


def _record(name: str, traced: Traced, decision: Decision, rewritten: bool) -> LayerRecord:
    routed = traced.routed
    return LayerRecord(
        name, rewritten, routed.form, decision.reason, traced.layer, decision, rounding=routed.rounding, opaque_reason=routed.opaque_reason
    )


def _example_calls(model: nn.Module, candidates: Sequence[Candidate], example_inputs: Any) -> dict[str, dict[str, Any]]:
    """What each block is called with when the model runs on the example inputs."""
    import inspect

    found: dict[str, dict[str, Any]] = {}
    handles = []
    for candidate in candidates:
        signature = inspect.signature(type(candidate.module).forward)

        def keep(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = candidate.name, signature: Any = signature
        ) -> None:
            bound = signature.bind(module, *args, **kwargs)
            found.setdefault(name, dict(list(bound.arguments.items())[1:]))

        handles.append(candidate.module.register_forward_pre_hook(keep, with_kwargs=True))
    args, kwargs = (
        ((), example_inputs)
        if isinstance(example_inputs, Mapping)
        else (tuple(example_inputs) if isinstance(example_inputs, (tuple, list)) else (example_inputs,), {})
    )
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    except Exception as error:
        raise ValueError(
            f"the model does not run on example_inputs: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return found


def _guarded(result: nn.Module, candidate: Candidate, *arguments: Any) -> LayerRecord:
    """A layer that moefx stumbles over stays as it was, and the report says over what."""
    try:
        return _rewrite(result, candidate, *arguments)
    except Exception as error:  # noqa: BLE001  whatever goes wrong in one layer must not cost the user the model
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}"
        return LayerRecord(candidate.name, False, reason=f"moefx failed on this layer: {first_line(error)} ({where}); please report it")


def _trace_once(
    candidate: Candidate, options: Options, example: Mapping[str, Any] | None, traces: dict[Hashable, Traced]
) -> tuple[Traced | LayerRecord, Candidate]:
    """The trace of a block (or of the experts inside it) and whose it is; blocks that differ in tensor values only share one."""
    key = (signature(candidate.module), _shapes(example))
    if key in traces:
        known = traces[key]
        mine = candidate if known.whole or candidate.inner is None else candidate.inner
        return replace(known, layer=replace(known.layer, name=mine.name)), mine
    traced = trace(candidate, options, example, execute=True)
    mine = candidate
    if isinstance(traced, LayerRecord) and candidate.inner is not None and "forward" not in candidate.inner.module.__dict__:
        inner = trace(candidate.inner, options, None, execute=True)
        if isinstance(inner, Traced):
            traced, mine = replace(inner, whole=False), candidate.inner
    if isinstance(traced, Traced) and not any(n.op == "get_attr" for n in traced.capture.graph.graph.nodes):
        traces[key] = traced
    return traced, mine


def _shapes(example: Mapping[str, Any] | None) -> Hashable:
    return None if example is None else tuple((n, tuple(v.shape) if isinstance(v, torch.Tensor) else repr(v)) for n, v in example.items())


def _rewrite(
    result: nn.Module,
    candidate: Candidate,
    options: Options,
    ranks: Ranks | None,
    example: Mapping[str, Any] | None,
    verify: bool,
    traces: dict[Hashable, Traced],
) -> LayerRecord:
    started = time.perf_counter()
    if "forward" in candidate.module.__dict__:
        reason = (
            "its forward was replaced on the instance (hooks of accelerate, or a patch), so what the class computes is not what it does"
        )
        return LayerRecord(candidate.name, False, reason=reason)
    inner = [m for m in candidate.module.modules() if m is not candidate.module]
    if swap.foreign_hooks([hooks for m in inner for hooks in (m._forward_hooks, m._forward_pre_hooks)]):
        return LayerRecord(candidate.name, False, reason="a submodule has forward hooks, which its rewritten form would not call")
    traced, candidate = _trace_once(candidate, options, example, traces)
    if isinstance(traced, LayerRecord):
        return traced
    block = result.get_submodule(candidate.name)
    failures: tuple[str, ...] = ()
    while True:
        decision = decide(traced.layer, options)
        decision = replace(decision, warnings=(*failures, *decision.warnings))
        record = _record(candidate.name, traced, decision, False)
        record.before = text(traced.capture.graph.graph)
        if decision.kernel is None:
            record.reason = "; ".join((*failures, record.reason or ""))
            return record
        try:
            _carry_out(record, candidate, block, traced, options, ranks, verify)
        except Exception as error:
            if ranks is not None:  # the other ranks would go on with another kernel
                raise
            failures += (f"kernel {decision.kernel.name} failed on this layer: {first_line(error)}",)
            options = replace(options, disable=(*options.disable, decision.kernel.name))
        else:
            record.seconds = time.perf_counter() - started
            return record


def _carry_out(
    record: LayerRecord, candidate: Candidate, block: nn.Module, traced: Traced, options: Options, ranks: Ranks | None, verify: bool
) -> None:
    """Lower, check and swap in what was decided; `record` says how it went."""
    decision = record.decision
    assert decision is not None
    lowered = lower(traced, decision, options, ranks)
    record.after = text(lowered.graph.graph)
    forward = build_forward(block, traced, lowered)
    if verify:
        record.check = check_block(candidate.module, block, traced, decision, options, ranks, forward)
        if not record.check["passed"]:
            found, allowed = record.check["relative_error"], record.check["tolerance"]
            record.reason = f"the check failed: relative error {found:.1e}, allowed {allowed:.0e}; the block stays as it was"
            return
    if lowered.local is not None:
        _keep_own_weights(block, lowered, forward)
    block.__dict__["forward"] = forward
    record.rewritten = True
    record.packed_bytes = forward.pack.new_bytes() if forward.pack is not None else 0


def _keep_own_weights(block: nn.Module, lowered: Lowered, forward: swap.BlockForward) -> None:
    """In a process group: the parameters of other ranks' experts go, stacked ones keep this rank's rows."""
    assert lowered.local is not None
    for name, (begin, end) in lowered.local.rows.items():
        ref = WeightRef(block, name)
        ref.owner._parameters[ref.name] = nn.Parameter(ref().detach()[begin:end].clone(), requires_grad=False)
    for name in lowered.local.dropped:
        ref = WeightRef(block, name)
        if ref.name in ref.owner._parameters:
            ref.owner._parameters[ref.name] = None
    for ref in forward.all_refs():
        ref.rows = None
    block.register_state_dict_post_hook(swap.note_expert_ranges(lowered.local.rows))
