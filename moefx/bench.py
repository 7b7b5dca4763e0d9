"""`moefx bench`: routed experts side by side with other ways to run them, interleaved in one run, against this machine's measured limits.

Each round reads a block of memory (the canary), then calls every contender once, in random order, on the next of several random
routings, so that weights come from memory and a slow moment hits all alike. Medians; floor =
max(bytes of the distinct experts / bandwidth, FLOPs / peak).
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from moefx import decision
from moefx.activation.spec import Activation
from moefx.bench_peers import MADE_FOR_EACH, PEERS, Call, Case, Missing, Run, compile_for
from moefx.kernels.cpu import panels
from moefx.layer import Layer
from moefx.options import Options

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16, "fp8": torch.bfloat16, "int8": torch.bfloat16}
ROUTINGS = ("even", "skewed")
_TOLERANCE = {"bfloat16": 0.03, "float16": 0.01, "float32": 1e-4, "fp8": 0.15, "int8": 0.15}
CANARY_BYTES = 256 << 20
COUNT = 12


def bench(
    shape: Sequence[int],
    tokens: Sequence[int],
    dtype: str = "bfloat16",
    peers: Sequence[str] | None = None,
    seconds: float = 10.0,
    routing: str = "even",
) -> dict[str, Any]:
    """`{"shape", "dtype", "kernel", "rows": [...], "missing": {...}}`; a row for each number of tokens. Its "best_transformers" is the
    fastest of transformers' forms there, compiled ones included, or None.

    shape: (H, D, E, K). dtype: "bfloat16", "float16", "float32", "fp8" or "int8" (the last two are the precision asked of moefx, on bf16
    activations; peers without it run in bf16). peers: names of `PEERS`; default: all. seconds: about how long a row is timed, in at least 5
    rounds, and the longest a compiled peer may take to meet the routings before that.
    routing: "even", or "skewed" (90% of the tokens to a tenth of the experts).
    """
    hidden, width, experts, top_k = _checked(shape, tokens, dtype, peers, routing)
    torch.manual_seed(0)
    half = DTYPES[dtype]
    w13 = _random((experts, 2 * width, hidden), hidden**-0.5, half)
    w2 = _random((experts, hidden, width), width**-0.5, half)
    found: dict[str, Any] = {"shape": list(shape), "dtype": dtype, "routing": routing, "threads": torch.get_num_threads(), "rows": []}
    missing: dict[str, str] = {}
    ours, found["kernel"] = _moefx(w13, w2, top_k, dtype)
    contenders: dict[str, Run] = {"moefx": ours}
    canary = panels.in_large_pages(torch.empty(CANARY_BYTES // 8, dtype=torch.int64)).fill_(1)  # as packed weights lie
    with torch.inference_mode():
        for count in tokens:
            case = Case(hidden, width, experts, top_k, count, dtype, w13, w2)
            calls = [_call(case, routing) for _ in range(COUNT)]
            for name in peers if peers is not None else PEERS:
                try:
                    if name not in contenders or name in MADE_FOR_EACH:
                        contenders[name] = PEERS[name](case)
                    if name in MADE_FOR_EACH:
                        compile_for(contenders[name], calls, seconds)
                except Missing as reason:
                    contenders.pop(name, None)
                    missing[f"{name} at {count} tokens" if name in MADE_FOR_EACH else name] = str(reason)
            found["rows"].append(_row(case, contenders, calls, canary, seconds))
    found["missing"] = missing
    return found


def _checked(
    shape: Sequence[int], tokens: Sequence[int], dtype: str, peers: Sequence[str] | None, routing: str
) -> tuple[int, int, int, int]:
    if len(shape) != 4 or any(n < 1 for n in shape) or shape[3] > shape[2]:
        raise ValueError(f"shape {','.join(map(str, shape))} must be four positive sizes H,D,E,K with K <= E, like 2048,512,128,8")
    if not tokens or any(t < 1 for t in tokens):
        raise ValueError(f"tokens {','.join(map(str, tokens))} must be numbers of at least 1, like 1,16,256")
    for what, value, allowed in (("dtype", dtype, DTYPES), ("routing", routing, ROUTINGS), *(("peer", p, PEERS) for p in peers or ())):
        if value not in allowed:
            raise ValueError(f"{what}={value!r} is unknown; choose one of {', '.join(allowed)}")
    return shape[0], shape[1], shape[2], shape[3]


def _random(shape: tuple[int, ...], scale: float, dtype: torch.dtype) -> torch.Tensor:
    """An expert at a time, so that no fp32 copy of all is held."""
    out = torch.empty(shape, dtype=dtype)
    for part in out:
        part.copy_(torch.randn(shape[1:]) * scale)
    return out


def _moefx(w13: torch.Tensor, w2: torch.Tensor, top_k: int, dtype: str) -> tuple[Run, str]:
    """The kernel the plan chooses on a CPU, its weights packed, and its name."""
    experts, hidden, width = w2.shape
    stored = str(w13.dtype).removeprefix("torch.")
    act = Activation("swiglu")
    layer = Layer("bench", "grouped_mm", experts, width, hidden, top_k, act, stored, stored)
    precision = dtype if dtype in ("fp8", "int8") else "preserve"
    kernel = decision.decide(layer, Options(precision=precision)).kernel
    assert kernel is not None
    code = act.encode()
    packed = kernel.pack(w13, None, w2, None, code)
    return lambda x, ids, weights: kernel.op(x, ids, weights, *packed, code), kernel.name


def _row(case: Case, contenders: dict[str, Run], calls: Sequence[Call], canary: torch.Tensor, seconds: float) -> dict[str, Any]:
    from moefx.kernels.cpu import limits

    wanted = contenders["moefx"](*calls[0]).float()
    errors = {name: _error(run(*calls[0]), wanted) for name, run in contenders.items()}
    for name, error in errors.items():
        if error > _TOLERANCE[case.dtype]:
            raise RuntimeError(f"{name} differs from moefx by {error:.2g} of the largest value: a comparison of times would mean nothing")
    bandwidths: list[float] = []
    times: dict[str, list[float]] = {name: [] for name in contenders}
    order = random.Random(0)
    started = time.perf_counter()
    while time.perf_counter() - started < seconds or len(bandwidths) < 5:
        bandwidths.append(limits.bytes_a_second(canary))
        for name, run in order.sample([*contenders.items()], len(contenders)):  # nobody always follows the same neighbour
            call = calls[len(bandwidths) % COUNT]
            begin = time.perf_counter()
            run(*call)
            times[name].append(time.perf_counter() - begin)
    medians = {name: 1e3 * statistics.median(t) for name, t in times.items()}
    own, bandwidth = medians.pop("moefx"), statistics.median(bandwidths)
    floor = _floor(case, calls, bandwidth)
    ratios = {name: {"ms": round(ms, 6), "ratio": round(ms / own, 3)} for name, ms in medians.items()}
    return {
        "tokens": case.tokens,
        "rounds": len(bandwidths),
        "bandwidth_gb_s": round(bandwidth / 1e9, 2),
        "moefx_ms": round(own, 6),
        "floor_ms": round(floor, 6),
        "percent_of_floor": round(100 * floor / own, 1),
        "peers": ratios,
        "best_transformers": _best_transformers(ratios),
    }


def _best_transformers(peers: dict[str, dict[str, float]]) -> dict[str, Any] | None:
    """The fastest of transformers' forms, compiled ones included; None where none was compared."""
    forms = [name for name in peers if name.startswith("transformers_")]
    if not forms:
        return None
    best = min(forms, key=lambda name: peers[name]["ms"])
    return {"name": best, "ratio": peers[best]["ratio"]}


def _call(case: Case, routing: str) -> Call:
    scores = torch.rand(case.tokens, case.experts)
    if routing == "skewed":
        hot = torch.rand(case.experts) < 0.1
        scores += hot * (torch.rand(case.tokens, 1) < 0.9)
    weights, ids = scores.topk(case.top_k)
    return torch.randn(case.tokens, case.hidden).to(case.w13.dtype), ids, weights / weights.sum(-1, keepdim=True)


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.float() - want).abs().max() / want.abs().max().clamp_min(1e-30)).item()


def _floor(case: Case, calls: Sequence[Call], bandwidth: float) -> float:
    """Milliseconds below which no form can be: reading each expert that is hit once, or the products in registers."""
    from moefx.kernels.cpu import limits

    distinct = statistics.mean(call[1].unique().numel() for call in calls)
    weight = 3 * case.hidden * case.width
    stored = 1 if case.dtype in ("fp8", "int8") else case.w13.element_size()
    kind = "int8" if case.dtype == "int8" else "bf16" if case.w13.dtype == torch.bfloat16 else "fp32"
    peak = max(limits.flops(kind) for _ in range(20)) or max(limits.flops("fp32") for _ in range(20))  # a disturbed one is too low
    return 1e3 * max(distinct * weight * stored / bandwidth, 2 * case.tokens * case.top_k * weight / peak)


def text(found: dict[str, Any]) -> str:
    """A table of medians and ratios (peer / moefx: above 1 moefx is faster)."""
    import io

    from rich.console import Console
    from rich.table import Table

    h, d, e, k = found["shape"]
    title = (
        f"H {h}, D {d}, E {e}, top-{k}, {found['dtype']}, {found['routing']} routing, {found['threads']} threads; kernel {found['kernel']}"
    )
    table = Table(title=title, title_justify="left")
    names = list(dict.fromkeys(n for row in found["rows"] for n in row["peers"]))
    best = ["best of transformers\n(ratio)"] if any(row["best_transformers"] for row in found["rows"]) else []
    for column in ("tokens", "GB/s", "moefx ms", "floor ms", "% of floor", *(f"{n}\nms (ratio)" for n in names), *best):
        table.add_column(column, justify="right")
    for row in found["rows"]:
        peers = [f"{row['peers'][n]['ms']:.2f} ({row['peers'][n]['ratio']:.2f})" if n in row["peers"] else "-" for n in names]
        own = [f"{row['bandwidth_gb_s']:.1f}", f"{row['moefx_ms']:.2f}", f"{row['floor_ms']:.2f}", f"{row['percent_of_floor']:.0f}"]
        form = row["best_transformers"]
        fastest = [f"{form['name'].removeprefix('transformers_')} ({form['ratio']:.2f})" if form else "-"] if best else []
        table.add_row(str(row["tokens"]), *own, *peers, *fastest)
    buffer = io.StringIO()
    Console(file=buffer, width=60 + 36 * (len(names) + len(best)), force_terminal=False).print(table)
    return buffer.getvalue() + "".join(f"{name}: not compared: {reason}\n" for name, reason in found["missing"].items())


def plot(found: dict[str, Any], path: str) -> None:
    """Times against tokens, as a picture. ValueError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install moefx[plot]") from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    rows = found["rows"]
    axes.plot([r["tokens"] for r in rows], [r["floor_ms"] for r in rows], "k--", label="floor")
    axes.plot([r["tokens"] for r in rows], [r["moefx_ms"] for r in rows], "o-", linewidth=2.5, label="moefx")
    for name in dict.fromkeys(n for r in rows for n in r["peers"]):
        points = [(r["tokens"], r["peers"][name]["ms"]) for r in rows if name in r["peers"]]
        axes.plot(*zip(*points, strict=True), "o-", label=name)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms a call", title=f"experts {found['shape']}, {found['dtype']}")
    axes.legend()
    figure.savefig(path, dpi=120)
