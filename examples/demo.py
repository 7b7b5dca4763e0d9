"""The main job: a Qwen3.5-MoE with the 35B-A3B's layer sizes, optimised on two expert-parallel ranks, then planned in FP8 for a GPU.

python examples/demo.py [--layers 2] [--tokens 64]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from rich.console import Console
from rich.progress import Progress

import moefx
from moefx.bench_model import build


def interleaved(functions: list, rounds: int) -> list[float]:
    """Median seconds of each, measured in turn."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for kept, function in zip(times, functions, strict=True):
            started = time.perf_counter()
            function()
            kept.append(time.perf_counter() - started)
    return [statistics.median(t) for t in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    console = Console()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("building the model", total=3)
        model = build(options.layers)
        progress.update(task, advance=1, description="optimising on 2 expert-parallel ranks")
        started = time.perf_counter()
        result = moefx.optimize(model, ep_size=2)
        seconds = time.perf_counter() - started
        progress.update(task, advance=1, description="comparing with eager")
        hidden = torch.randn(1, options.tokens, model.config.hidden_size, dtype=torch.bfloat16)
        block, rewritten = model.model.layers[0].mlp, result.model.layers[0].mlp
        with torch.no_grad():
            want, got = block(hidden), rewritten(hidden)
            one = hidden[:, :1]
            eager_ms, fast_ms, eager_one, fast_one = (
                1e3 * s
                for s in interleaved([lambda: block(hidden), lambda: rewritten(hidden), lambda: block(one), lambda: rewritten(one)], 7)
            )
        progress.update(task, advance=1)
    console.print(f"{options.layers} layers of Qwen3.5-35B-A3B size in bfloat16, optimised in {seconds:.1f} s\n")
    print(moefx.report(result).to_text())
    error = (got.float() - want.float()).abs().max().item()
    console.print(
        f"one layer, {options.tokens} tokens: largest difference to eager {error:.1e} of {want.float().abs().max().item():.1e}",
        highlight=False,
    )
    console.print(
        f"  {options.tokens} tokens: eager {eager_ms:.1f} ms, moefx {fast_ms:.1f} ms, ratio {eager_ms / fast_ms:.2f}", highlight=False
    )
    console.print(f"  1 token: eager {eager_one:.1f} ms, moefx {fast_one:.1f} ms, ratio {eager_one / fast_one:.2f}\n", highlight=False)
    for ranks in (2, 4):
        print(moefx.plan("qwen3.5-35b-a3b", ep_size=ranks, target="sm90", precision="fp8").to_text())


if __name__ == "__main__":
    main()
