"""Plans as one self-contained page: the matrix of choices, then every layer with each candidate's predicates. No network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moefx.reports import Report

_STYLE = """\
body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:70em;padding:0 1em;color:#1b1f24}
h1{font-size:1.4em}h2{font-size:1.1em;margin-top:2em}
table{border-collapse:collapse;margin:.6em 0}th,td{border:1px solid #d0d7de;padding:.3em .7em;text-align:left;vertical-align:top}
th{background:#f6f8fa}
code{font-family:ui-monospace,monospace}.proved{color:#116329}.refuted{color:#a40e26}.unknown,.guarded{color:#7d4e00}
pre{background:#f6f8fa;padding:1em;overflow:auto;font-size:12px}"""


def page(reports: Sequence[Report]) -> str:
    """The page of one or more reports of the same model."""
    title = escape(reports[0].title or "model")
    body = "".join(_report(r) for r in reports)
    head = f"<!doctype html><html lang='en'><meta charset='utf-8'><title>moefx: {title}</title><style>{_STYLE}</style>"
    return f"{head}<h1>moefx: {title}</h1>{_matrix(reports)}{body}</html>"


def _matrix(reports: Sequence[Report]) -> str:
    rows = "".join(
        f"<tr><td>{escape(str(r.options.target))}<td>{r.options.ep_size}<td>{escape(r.options.a2a)}<td>{escape(r.options.precision)}<td>{_choice(r)}</tr>"
        for r in reports
    )
    return f"<table><tr><th>target<th>ep_size<th>a2a<th>precision<th>kernel and shared expert</tr>{rows}</table>"


def _choice(report: Report) -> str:
    found = []
    for layer in report.layers:
        shared = layer["shared_expert"]
        place = f", shared expert {shared['placement']}" if shared.get("present") else ""
        found.append(f"{layer['experts']['kernel'] or 'left alone'}{place}")
    return escape("; ".join(dict.fromkeys(found)) or "no mixture-of-experts layer")


def _report(report: Report) -> str:
    o = report.options
    head = f"<h2>{escape(o.target)}, ep_size {o.ep_size}, a2a {escape(o.a2a)}, {escape(o.precision)}</h2>"
    return (
        head
        + "".join(_layer(r.to_json(), r.before, r.after) for r in report.records)
        + "".join(f"<p>{escape(s['name'])}: {escape(s['reason'])}</p>" for s in report.skipped)
    )


def _layer(layer: dict[str, Any], before: str, after: str) -> str:
    dims = ", ".join(f"{k} = {v}" for k, v in layer["dims"].items())
    parts = [f"<h3>{escape(layer['name'] or 'the module itself')}</h3><p>{escape(dims)}</p>"]
    if layer["reason"]:
        parts.append(f"<p>{escape(str(layer['reason']))}</p>")
    shared = layer["shared_expert"]
    if shared.get("present"):
        parts.append(f"<p>shared expert {escape(str(shared['placement']))}: {escape(str(shared['reason']))}</p>")
    rows = []
    for candidate in layer["experts"]["candidates"]:
        predicates = "<br>".join(_predicate(p) for p in candidate["predicates"]) or "no conditions"
        checks = "<br>".join(f"<code>{escape(c)}</code>" for c in candidate["value_checks"])
        rows.append(
            f"<tr><td>{escape(candidate['kernel'])}<td class='{candidate['status']}'>{candidate['status']}<td>{predicates}<td>{checks}</tr>"
        )
    parts.append(f"<table><tr><th>candidate<th>status<th>predicates<th>checked on values</tr>{''.join(rows)}</table>")
    for name, text in (("before", before), ("after", after)):
        if text:
            parts.append(f"<details><summary>graph {name}</summary><pre>{escape(text)}</pre></details>")
    return "".join(parts)


def _predicate(p: dict[str, Any]) -> str:
    sides = f" &nbsp; {p['lhs']} vs {p['rhs']}" if p["lhs"] is not None else ""
    values = ", ".join(f"{k} = {v}" for k, v in p["values"].items())
    return f"<span class='{p['status']}'>{p['status']}</span> <code>{escape(p['text'])}</code> ({escape(values)}){sides}"
