"""Command line: `moefx plan MODEL`, `moefx bench`, `moefx doctor`. Mistakes of the user's are one line on stderr and exit code 2."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence

from moefx.options import A2A, PRECISIONS, TARGETS


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="moefx", description="A graph compiler for mixture-of-experts models in PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser(
        "plan",
        help="what moefx would do with a model, and why",
        description="Which kernel each MoE layer gets, decided by proof, without weights or hardware.",
    )
    plan.add_argument("model", nargs="?", help="a built-in name, a config.json or a checkpoint folder")
    plan.add_argument("--list", action="store_true", help="list the built-in names with the source of their sizes")
    plan.add_argument("--ep-size", default="1", help="expert-parallel ranks; several (1,2,4) print a matrix")
    plan.add_argument("--a2a", default="auto", help=f"{', '.join(A2A)}; several print a matrix")
    plan.add_argument("--target", default="cpu", help=f"{', '.join(TARGETS)}; several print a matrix")
    plan.add_argument("--precision", default="preserve", help=", ".join(PRECISIONS))
    plan.add_argument("--tokens", type=int, default=None, help="tokens of one call, when known")
    output = plan.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON")
    output.add_argument("--html", metavar="FILE", help="write a self-contained page")
    bench = commands.add_parser(
        "bench",
        help="routed experts against other ways to run them, on this CPU",
        description="Medians of one interleaved run, ratios (peer / moefx) and the share of this machine's measured floor.",
    )
    bench.add_argument("--model", action="store_true", help="a whole model instead: prefill and generate of Qwen3.5-35B-A3B layers")
    bench.add_argument("--layers", type=int, default=4, help="layers of that model")
    bench.add_argument("--compiled", action="store_true", help="with --model: torch.compile of transformers' form too (minutes)")
    bench.add_argument("--shape", default="2048,512,128,8", help="H,D,E,K: hidden size, intermediate size, experts, experts a token")
    bench.add_argument("--tokens", default="1,16,64,256", help="tokens of a call; several with commas between")
    bench.add_argument("--dtype", default="bfloat16", help="bfloat16, float16, float32, fp8, int8")
    bench.add_argument("--peers", default=None, help="names with commas between (default: all that are installed)")
    bench.add_argument("--routing", default="even", help="even, skewed")
    bench.add_argument("--seconds", type=float, default=10.0, help="about how long each row takes")
    bench.add_argument("--json", action="store_true", help="print JSON")
    bench.add_argument("--plot", metavar="FILE", help="write a picture")
    commands.add_parser("doctor", help="what this machine has and which kernels that enables")
    options = parser.parse_args(arguments)
    try:
        return {"plan": _plan, "bench": _bench, "doctor": _doctor}[options.command](options)
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        print(f"moefx: {str(error).splitlines()[0] if str(error) else type(error).__name__}", file=sys.stderr)
        return 2


def _bench(options: argparse.Namespace) -> int:
    from moefx import bench, bench_model

    if options.model:
        whole = bench_model.end_to_end(options.layers, compiled=options.compiled)
        print(json.dumps(whole, indent=2) if options.json else bench_model.text(whole))
        return 0
    peers = options.peers.split(",") if options.peers else None
    shape, tokens = _numbers(options.shape, "--shape"), _numbers(options.tokens, "--tokens")
    found = bench.bench(shape, tokens, options.dtype, peers, options.seconds, options.routing)
    if options.plot:
        bench.plot(found, options.plot)
    print(json.dumps(found, indent=2) if options.json else bench.text(found))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    del options
    from moefx.doctor import text

    print(text())
    return 0


def _plan(options: argparse.Namespace) -> int:
    from moefx.html import page
    from moefx.models import BUILT_IN
    from moefx.planner import plan

    if options.list:
        for name, (_, source) in BUILT_IN.items():
            print(f"{name}: {source}")
        return 0
    if options.model is None:
        raise ValueError("plan needs a model: a built-in name (moefx plan --list), a config.json or a checkpoint folder")
    choices = list(itertools.product(_numbers(options.ep_size, "--ep-size"), options.a2a.split(","), options.target.split(",")))
    reports = [plan(options.model, ep_size=e, a2a=a, target=t, precision=options.precision, tokens=options.tokens) for e, a, t in choices]
    if options.html:
        with open(options.html, "w", encoding="utf-8") as file:
            file.write(page(reports))
        print(f"wrote {options.html}")
    elif options.json:
        print(reports[0].to_json() if len(reports) == 1 else json.dumps({"plans": [r.to_dict() for r in reports]}, indent=2))
    elif len(reports) == 1:
        print(reports[0].to_text(), end="")
    else:
        _print_matrix(reports)
    return 0


def _numbers(text: str, option: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"{option} {text!r} must be a number or several with commas between, like 1,2,4") from error


def _print_matrix(reports: Sequence) -> None:
    from rich.console import Console
    from rich.table import Table

    from moefx.reports import kernel_text

    table = Table(title=f"moefx: {reports[0].title}, precision {reports[0].options.precision}", title_justify="left")
    for column in ("target", "ep_size", "a2a", "E", "kernel", "shared expert", "why"):
        table.add_column(column)
    for report in {r.options: r for r in reports}.values():
        for record in report.records:
            j = record.to_json()
            shared = j["shared_expert"]
            refused = next((o for o in record.decision.candidates if o.first_failure()), None) if record.decision else None
            failed = refused.first_failure() if refused else None
            why = record.reason or ""
            if record.rewritten and refused and failed:
                why = f"{refused.kernel}: {failed.text} ({failed.lhs} vs {failed.rhs})"
            table.add_row(
                report.options.target,
                str(report.options.ep_size),
                report.options.a2a,
                str(j["dims"]["E"]),
                kernel_text(record),
                shared["placement"] if shared["present"] else "none",
                why,
            )
    console = Console()
    console.width = max(console.width, 120)
    console.print(table)
    warnings = [w for report in reports for record in report.records if record.decision for w in record.decision.warnings]
    for warning in dict.fromkeys(warnings):
        console.print(f"warning: {warning}", highlight=False)
