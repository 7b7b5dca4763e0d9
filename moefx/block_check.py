"""A rewritten block against the block as it was, on inputs made up for it."""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
from torch import nn

from moefx.options import Options
from moefx.rewrite import Ranks, Traced, build_forward, lower
from moefx.swap import BlockForward
from moefx.verify import TOLERANCE, block_inputs, outputs_differ


def check_block(
    original: nn.Module, block: nn.Module, traced: Traced, decision: Any, options: Options, ranks: Ranks | None, forward: BlockForward
) -> dict[str, Any]:
    """The block as it was against its new forward; a lossy kernel against its reference with the same quantisation."""
    started = time.perf_counter()
    generator = torch.Generator().manual_seed(1)
    tolerance = TOLERANCE.get(getattr(torch, traced.layer.dtype), 3e-2)
    absolute = relative = distance = 0.0
    wanted = None
    if decision.kernel.lossy:
        wanted = build_forward(block, traced, lower(traced, decision, options, ranks, reference=True))
        tolerance = max(tolerance, TOLERANCE[torch.bfloat16])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sizes = _both_sides(decision.guard) if decision.guard else ()
        example = list(traced.capture.inputs.values())
        calls = [
            dict(zip(traced.capture.inputs, inputs, strict=True)) | dict(traced.capture.constants)
            for inputs in block_inputs(example, traced.routed.experts, traced.routed.top_k, generator, sizes)
        ]
        # Before the first call of the new forward packs the weights: what the block itself needs would lie beside the pack.
        outputs = [type(original).forward(original, **arguments) for arguments in calls]
        for arguments, was in zip(calls, outputs, strict=True):
            got = forward(**arguments)
            want = was if wanted is None else wanted(**arguments)
            a, r = outputs_differ(got, want)
            absolute, relative = max(absolute, a), max(relative, r)
            distance = max(distance, outputs_differ(got, was)[1])
    passed = relative <= tolerance
    if ranks is not None:
        from moefx import parallel

        passed = parallel.all_agree(passed, ranks.group_name)
    return {
        "ran": True,
        "passed": passed,
        "max_abs_error": absolute,
        "relative_error": relative,
        "tolerance": tolerance,
        "distance_to_original": distance,
        "seconds": round(time.perf_counter() - started, 3),
    }


def _both_sides(guard: str) -> tuple[int, ...]:
    """The largest and the smallest number of tokens up to 2,048 for which a guard holds, and for which it does not."""
    from moefx.prove import compiled, parse, truth

    code = compiled(parse(guard))
    holds = [truth(code, {"T": n}) for n in range(1, 2049)]
    ends = [[n for n, h in enumerate(holds, 1) if h == side] for side in (True, False)]
    return tuple(dict.fromkeys(n for found in ends if found for n in (found[0], found[-1])))
