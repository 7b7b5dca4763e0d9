"""Plans as one self-contained page: the matrix of choices, then every layer with each candidate's predicates. No network, no script."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moefx.reports import LayerRecord, Report

_STYLE = """\
:root{--line:#d8dee4;--soft:#f6f8fa;--text:#1f2328;--quiet:#59636e;--good:#1a7f37;--bad:#b42318;--open:#8a5a00}
body{font:15px/1.5 system-ui,"Segoe UI",Helvetica,Arial,sans-serif;margin:2.5em auto;max-width:88em;padding:0 1.5em;color:var(--text)}
h1{font-size:1.5em;margin:0 0 .2em}h2{font-size:1.15em;margin:2.2em 0 .4em;padding-top:1em;border-top:1px solid var(--line)}
h3{font-size:1em;margin:1.4em 0 .3em}p{margin:.4em 0;max-width:60em}.quiet{color:var(--quiet)}
table{border-collapse:collapse;margin:.7em 0;width:100%}
th,td{padding:.4em .8em;text-align:left;vertical-align:top;border-bottom:1px solid var(--line)}
th{background:var(--soft);font-weight:600}td.number{text-align:right;font-variant-numeric:tabular-nums}
code,pre{font-family:ui-monospace,SFMono-Regular,Menlo,monospace;font-size:.92em}.miss-cell{white-space:nowrap}
.status{display:inline-block;min-width:4.6em;padding:0 .5em;border-radius:1em;font-size:.85em;text-align:center;color:#fff}
.proved{background:var(--good)}.refuted{background:var(--bad)}.guarded,.unknown{background:var(--open)}
.chosen td{background:#eef7f0}.miss{border-left:3px solid var(--bad);padding-left:.8em}
ul.predicates{list-style:none;margin:0;padding:0}ul.predicates li{margin:.15em 0}summary{cursor:pointer}
pre{background:var(--soft);padding:1em;overflow:auto;line-height:1.35}a{color:inherit}"""


def page(reports: Sequence[Report]) -> str:
    """The page of one or more reports of the same model."""
    reports = list({r.options: r for r in reports}.values())  # on one rank every a2a is the same plan
    title = escape(reports[0].title or "model")
    head = f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>moefx: {title}</title><style>{_STYLE}</style></head>"
    intro = "<p class='quiet'>Which kernel each mixture-of-experts layer gets, and what stands in the way of the others.</p>"
    body = "".join(_report(i, r) for i, r in enumerate(reports))
    return f"{head}<body><h1>moefx: {title}</h1>{intro}{_matrix(reports)}{body}</body></html>"


def _matrix(reports: Sequence[Report]) -> str:
    columns = ("target", "ep_size", "a2a", "precision", "layers", "kernel", "shared expert", "GiB of experts a rank", "nearest miss")
    rows = []
    for i, report in enumerate(reports):
        o = report.options
        records: Sequence[LayerRecord | None] = report.records or [None]
        for record in records:
            cells = [f"<a href='#plan{i}'>{escape(o.target)}</a>", str(o.ep_size), escape(o.a2a), escape(o.precision), *_summary(record)]
            rows.append("<tr>" + "".join(f"<td>{c}</td>" for c in cells) + "</tr>")
    return f"<table><tr>{''.join(f'<th>{c}</th>' for c in columns)}</tr>{''.join(rows)}</table>"


def _summary(record: LayerRecord | None) -> list[str]:
    from moefx.reports import kernel_text

    if record is None:
        return ["0", "no mixture-of-experts layer", "", "", ""]
    j = record.to_json()
    shared = j["shared_expert"]
    held = j.get("expert_bytes_per_rank")
    return [
        str(j.get("count", 1)),
        escape(kernel_text(record)),
        escape(str(shared["placement"])) if shared.get("present") else "none",
        f"{held / 2**30:.3g}" if held else "",
        _nearest_miss(record),
    ]


def _nearest_miss(record: LayerRecord) -> str:
    for outcome in record.decision.candidates if record.decision else ():
        failed = outcome.first_failure()
        if failed is not None:
            sides = f" <span class='quiet'>({failed.lhs} vs {failed.rhs})</span>" if failed.lhs is not None else ""
            return f"<span class='miss-cell'>{escape(outcome.kernel)}: <code>{escape(failed.text)}</code>{sides}</span>"
    return escape(record.reason or "")


def _report(index: int, report: Report) -> str:
    o = report.options
    head = f"<h2 id='plan{index}'>{escape(o.target)}, ep_size {o.ep_size}, a2a {escape(o.a2a)}, precision {escape(o.precision)}</h2>"
    skipped = "".join(f"<p>{escape(s['name'])}: {escape(s['reason'])}</p>" for s in report.skipped)
    return head + "".join(_layer(r) for r in report.records) + skipped


def _layer(record: LayerRecord) -> str:
    j = record.to_json()
    dims = " &nbsp; ".join(f"<code>{k} = {v}</code>" for k, v in j["dims"].items())
    count = j.get("count", 1)
    times = f" <span class='quiet'>&times; {count}</span>" if count > 1 else ""
    parts = [f"<h3>{escape(j['name'] or 'the module itself')}{times}</h3><p>{dims}</p>", _activation(j["activation"])]
    if j["reason"]:
        parts.append(f"<p class='miss'>{escape(str(j['reason']))}</p>")
    shared = j["shared_expert"]
    if shared.get("present"):
        parts.append(f"<p>Shared expert <b>{escape(str(shared['placement']))}</b>: {escape(str(shared['reason']))}</p>")
    parts += [f"<p class='miss'>{escape(w)}</p>" for w in j.get("warnings", ())]
    if j["experts"]["candidates"]:
        parts.append(_candidates(j["experts"], shared.get("placement") == "fused"))
    for name, text in (("before", record.before), ("after", record.after)):
        if text:
            parts.append(f"<details><summary>graph {name}</summary><pre>{escape(text)}</pre></details>")
    return "".join(parts)


def _activation(activation: dict[str, Any]) -> str:
    if not activation:
        return ""
    limit = f", {activation['clamp']}-clamp at {activation['limit']:g}" if activation.get("limit") is not None else ""
    return f"<p class='quiet'>activation {escape(activation['kind'])}{limit}, columns {escape(activation['columns'])}</p>"


def _candidates(experts: dict[str, Any], fused: bool) -> str:
    chosen = str(experts["kernel"]) + ("+shared" if fused else "") + ("+pad" if experts.get("pad") else "")
    rows = []
    for c in experts["candidates"]:
        predicates = "".join(_predicate(p) for p in c["predicates"]) or "<li class='quiet'>no conditions</li>"
        checks = "<br>".join(f"<code>{escape(v)}</code>" for v in c["value_checks"])
        repair = f"<br><span class='quiet'>{escape(c['repair'])}</span>" if c.get("repair") else ""
        moved = f"{c['bytes_moved'] / 2**20:,.0f}" if c.get("bytes_moved") is not None else ""
        mark = " class='chosen'" if c["kernel"] == chosen else ""
        name = f"<b>{escape(c['kernel'])}</b>{' (chosen)' if mark else ''}{repair}"
        rows.append(
            f"<tr{mark}><td>{name}</td><td>{_status(c['status'])}</td><td><ul class='predicates'>{predicates}</ul></td>"
            f"<td>{checks}</td><td class='number'>{moved}</td></tr>"
        )
    head = "<tr><th>candidate</th><th>status</th><th>predicates</th><th>checked on values</th><th>MiB moved a call</th></tr>"
    return f"<table>{head}{''.join(rows)}</table>"


def _status(status: str) -> str:
    return f"<span class='status {status}'>{status}</span>"


def _predicate(p: dict[str, Any]) -> str:
    sides = f"{p['lhs']} vs {p['rhs']}; " if p["lhs"] is not None else ""
    values = ", ".join(f"{k} = {v}" for k, v in p["values"].items())
    why = f": {escape(p['why'])}" if p.get("why") and p["status"] != "proved" else ""
    return f"<li>{_status(p['status'])} <code>{escape(p['text'])}</code> <span class='quiet'>({sides}{escape(values)})</span>{why}</li>"
