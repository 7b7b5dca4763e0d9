"""Canonical operations and their plain-PyTorch reference meaning.

Every spelling of a mixture-of-experts layer is raised to these; kernels are measured against them.

`experts(x, ids, weights, w13, b13, w2, b2, activation, first)`:

    out[t] = sum_k weights[t, k] * (w2[e] @ act(w13[e] @ x[t] + b13[e]) + b2[e])      with e = ids[t, k] - first

| argument | shape | dtype |
|---|---|---|
| x | [T, H] | floating |
| ids | [T, K] | integer; an id outside [first, first + E) adds nothing (it belongs to another rank) |
| weights | [T, K] | floating |
| w13 | [E, 2D, H] ([E, D, H] without a gate) | x's |
| b13 | [E, 2D] or None | x's |
| w2 | [E, H, D] | x's |
| b2 | [E, H] or None | x's |
| activation | `Activation.encode()` | |

Result [T, H] in x's dtype; the sum over K runs in the wider of x's and the weights' dtype.
"""

from __future__ import annotations

import torch

from moefx.activation.spec import Activation

_library = torch.library.Library("moefx", "DEF")


def define(schema: str, implementation, fake, device: str = "CompositeExplicitAutograd"):
    """Define `moefx::<schema>` with one implementation and a fake; returns the op overload.

    `Library.define/impl` costs half the call overhead of `torch.library.custom_op` (5.7 against 8 us in inference mode).
    """
    name = schema[: schema.index("(")]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, implementation, device)
    torch.library.register_fake(f"moefx::{name}", fake, lib=_library)
    return getattr(torch.ops.moefx, name).default


def implement(name: str, implementation, device: str) -> None:
    """One more implementation of `moefx::<name>`, for another device."""
    _library.impl(name, implementation, device)


def sizes(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> tuple[int, int, int]:
    """(T, H, K) of an experts op. ValueError for other shapes: kernels would read past the ends, torch operations would broadcast."""
    rows, chosen = x.shape, ids.shape
    if len(rows) != 2 or len(chosen) != 2 or chosen[0] != rows[0] or weights.shape != chosen:
        raise ValueError(
            "x [T, H], ids [T, K] and weights [T, K] are expected, "
            f"not {list(rows)}, {list(chosen)} and {list(weights.shape)}: cut x to the rows that have ids and weights"
        )
    return rows[0], rows[1], chosen[1]


def _expert_linear(x, ids, w, b, first=0):
    out = x.new_zeros(x.shape[0], w.shape[1])
    for e in (torch.unique(ids) - first).tolist():
        if 0 <= e < w.shape[0]:
            rows = (ids == e + first).nonzero().squeeze(-1)
            y = torch.nn.functional.linear(x.index_select(0, rows), w[e], None if b is None else b[e])
            out.index_copy_(0, rows, y)
    return out


def _expert_linear_fake(x, ids, w, b, first=0):
    return x.new_empty(x.shape[0], w.shape[1])


expert_linear = define(
    "expert_linear(Tensor x, Tensor ids, Tensor w, Tensor? b, int first=0) -> Tensor", _expert_linear, _expert_linear_fake
)
"""x [R, in], ids [R], w [E, out, in], b [E, out] -> [R, out]: row r through expert ids[r] - first; rows of other ranks are zero."""


def _experts(x, ids, weights, w13, b13, w2, b2, activation, first=0):
    tokens, _, top_k = sizes(x, ids, weights)
    rows, flat = x.repeat_interleave(top_k, 0), ids.reshape(-1)
    y = _expert_linear(rows, flat, w13, b13, first)
    y = _expert_linear(Activation.decode(activation)(y), flat, w2, b2, first)
    wide = torch.promote_types(x.dtype, weights.dtype)
    return (y.view(tokens, top_k, y.shape[-1]).to(wide) * weights.to(wide).unsqueeze(-1)).sum(1).to(x.dtype)


def _experts_fake(x, ids, weights, w13, b13, w2, b2, activation, first=0):
    return x.new_empty(x.shape[0], w2.shape[1])


experts = define(
    "experts(Tensor x, Tensor ids, Tensor weights, Tensor w13, Tensor? b13, Tensor w2, Tensor? b2, str activation, int first=0) -> Tensor",
    _experts,
    _experts_fake,
)


def _shared_expert(x, gate, w13, b13, w2, b2, activation):
    h = Activation.decode(activation)(torch.nn.functional.linear(x, w13, b13))
    y = torch.nn.functional.linear(h, w2, b2)
    return y if gate is None else y * gate


def _shared_expert_fake(x, gate, w13, b13, w2, b2, activation):
    return x.new_empty(x.shape[0], w2.shape[0])


shared_expert = define(
    "shared_expert(Tensor x, Tensor? gate, Tensor w13, Tensor? b13, Tensor w2, Tensor? b2, str activation) -> Tensor",
    _shared_expert,
    _shared_expert_fake,
)
"""x [T, H], gate [T, 1] or None, w13 [2D, H], w2 [H, D] -> [T, H] = gate * (w2 @ act(w13 @ x + b13) + b2)."""


def _grouped_mm(a, b, offs):
    out = a.new_zeros(a.shape[0], b.shape[2])
    start = 0
    for e, end in enumerate(offs.tolist()):
        if end > start:
            torch.mm(a[start:end], b[e], out=out[start:end])
        start = end
    return out


def _grouped_mm_fake(a, b, offs):
    return a.new_empty(a.shape[0], b.shape[2])


grouped_mm = define("grouped_mm(Tensor a, Tensor b, Tensor offs) -> Tensor", _grouped_mm, _grouped_mm_fake)
"""a [R, in], b [E, in, out], offs [E] int -> [R, out]: torch's grouped_mm for every dtype. Capture puts it in the place of
`F.grouped_mm`, which export refuses on a CPU outside bf16."""
