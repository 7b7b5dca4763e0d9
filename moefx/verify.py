"""Check before accepting: the traced region against its canonical form, and the rewritten block against the block as it was.

Both run in the model's own dtype on the model's own weights. `region_differs` chooses x, ids and weights itself, so that every expert is
reached, one expert gets no token, one gets all, and the clamps bite; `block_differs` goes through the model's router.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from moefx.graph import CASTS, VIEWS, aten, extract, getitem_source, is_call, numel, shape, through_views

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest allowed error of a token's output row, relative to the row's largest value (or the batch's mean row, if that is larger)."""


@dataclass(frozen=True)
class Tokens:
    """How many tokens a trial may have: `fixed` by the trace or any multiple of `step`; whether their ids are `distinct` for sure."""

    fixed: int | None = None
    step: int = 1
    distinct: bool = True
    many: int = 1100


def routings(experts: int, top_k: int, generator: torch.Generator, tokens: Tokens) -> Iterator[torch.Tensor]:
    """ids [T, K]: none, one token, every expert at least once, many tokens to the same experts, one expert left out.

    Distinct within a token, and where the router does not promise that, with duplicates too. For a trace of a fixed number of tokens:
    tables of that many rows, enough of them to reach every expert.
    """
    if tokens.fixed is not None:
        order = torch.randperm(experts, generator=generator)
        for start in range(0, experts, max(1, tokens.fixed * top_k)):
            yield order[(start + torch.arange(tokens.fixed * top_k)) % experts].view(tokens.fixed, top_k)
        yield torch.arange(top_k).expand(tokens.fixed, top_k).contiguous()
        yield _distinct(tokens.fixed, experts, top_k, generator)
    else:
        step = tokens.step
        yield torch.empty(0, top_k, dtype=torch.int64)
        yield _distinct(step, experts, top_k, generator)
        count = step * max(33, 2 * -(-experts // top_k) + 3)
        covering = (torch.arange(count * top_k) % experts).view(count, top_k)
        yield covering[torch.randperm(count, generator=generator)]
        yield (torch.arange(top_k) % experts).expand(tokens.many * step, top_k).contiguous()
        if experts > top_k:
            without = _distinct(29 * step, experts - 1, top_k, generator)
            skipped = int(torch.randint(0, experts, (1,), generator=generator))
            yield without + (without >= skipped)
    if not tokens.distinct:
        yield torch.randint(0, experts, (tokens.fixed or 31 * tokens.step, top_k), generator=generator)


def _distinct(tokens: int, experts: int, top_k: int, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(tokens, experts, generator=generator).topk(min(top_k, experts), dim=1).indices


def hidden_states(tokens: int, weight: torch.Tensor, limit: float | None, generator: torch.Generator) -> torch.Tensor:
    """x [T, H] in the weight's dtype; every other token is large enough for its gate products to pass `limit` either way."""
    x = torch.randn(tokens, weight.shape[-1], generator=generator, dtype=torch.float32)
    if limit is not None:
        sample = weight.detach().flatten()[:: max(1, weight.numel() // 65536)].float()
        spread = float(sample.std()) * weight.shape[-1] ** 0.5 or 1.0
        x[::2] *= max(1.0, 2.5 * limit / spread)
    return x.to(weight.dtype)


def error_of(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest row error relative to the row (see TOLERANCE); inf where one has a NaN or infinity the other has not."""
    if got.shape != want.shape:
        return float("inf")
    if want.numel() == 0:
        return 0.0
    wide = torch.float64 if want.dtype in (torch.float32, torch.float64) else torch.float32
    a, b = got.to(wide).flatten(0, -2), want.to(wide).flatten(0, -2)
    if not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf")
    a, b = a.nan_to_num(0, 0, 0), b.nan_to_num(0, 0, 0)
    rows = b.abs().amax(-1)
    scale = torch.maximum(rows, rows.mean()).clamp_min(torch.finfo(torch.float32).tiny)
    return float(((a - b).abs().amax(-1) / scale).max())


def region_differs(graph: fx.Graph, cut: Any, new: fx.Node, layer: Any, tensors: Callable[[str], torch.Tensor]) -> str | None:
    """None when the region of `cut` and the region that ends in `new` agree on every routing; else what differs."""
    inputs = [cut.x, cut.ids, cut.weights]
    try:
        old_module, old_names = extract(graph, inputs, cut.output)
        new_module, new_names = extract(graph, inputs, new)
    except ValueError as error:
        return str(error)
    generator = torch.Generator().manual_seed(0)
    old_weights = _telling([tensors(n.meta["weight"]) for n in old_names], generator)
    by_name = {n.meta["weight"]: w for n, w in zip(old_names, old_weights, strict=True)}
    left_out = [name for name in by_name.keys() - {n.meta["weight"] for n in new_names} if by_name[name].is_floating_point()]
    if left_out:
        return f"the region also reads {sorted(left_out)[0]}, which the canonical form does not"
    new_weights = [by_name[n.meta["weight"]] if n.meta["weight"] in by_name else tensors(n.meta["weight"]) for n in new_names]
    device = old_weights[0].device
    first = max(new_weights, key=torch.Tensor.numel)
    for ids in routings(layer.experts, layer.top_k, generator, _tokens(cut, first)):
        x = _example(cut.x, hidden_states(ids.shape[0], _facing(first, layer.hidden), layer.activation.limit, generator))
        weights = _weights(ids, generator)
        weights = weights.abs() if nonnegative(cut.weights) else weights
        arguments = [
            x.to(device=device, dtype=cut.x.meta["val"].dtype),
            _reshape(cut.ids, ids).to(device=device, dtype=cut.ids.meta["val"].dtype),
            _reshape(cut.weights, weights).to(device=device, dtype=cut.weights.meta["val"].dtype),
        ]
        with torch.no_grad():
            try:
                want = old_module(*arguments, *old_weights)
            except (RuntimeError, IndexError) as failure:
                if ids.shape[0] == 0:
                    continue
                return f"the traced region failed on {ids.shape[0]} tokens: {str(failure).splitlines()[0]}"
            got = new_module(*arguments, *new_weights)
        found, allowed = error_of(got, want), TOLERANCE.get(want.dtype, 3e-2)
        if not found <= allowed:
            return f"with {ids.shape[0]} tokens the outputs differ by {found:.1e} of a row's largest value (allowed {allowed:.0e})"
    return None


def _telling(weights: list[torch.Tensor], generator: torch.Generator) -> list[torch.Tensor]:
    """The weights, random ones in the place of those that hide a difference: constant (zeros, ones), or equal for two experts.

    What holds for today's values only (fresh, upcycled or not yet loaded experts) must not be proved by them.
    """
    kept: list[torch.Tensor] = []
    seen: list[torch.Tensor] = []
    for weight in weights:
        if not weight.is_floating_point() or weight.numel() == 0:
            kept.append(weight)
            continue
        rows = weight.detach().flatten(1) if weight.dim() > 1 else weight.detach().reshape(1, -1)
        rows = rows[:, :: max(1, rows.shape[1] // 64)][:4096].float()
        alike = any(s.shape == rows.shape and torch.equal(s, rows) for s in seen)
        seen.append(rows)
        twins = rows.shape[0] > 1 and weight.dim() == 3 and rows.unique(dim=0).shape[0] < rows.shape[0]
        if alike or twins or bool((rows == rows[0, 0]).all()):
            spread = weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.5
            new = torch.randn(weight.shape, generator=generator) * spread
            kept.append(new.to(device=weight.device, dtype=weight.dtype))
        else:
            kept.append(weight)
    return kept


def _tokens(cut: Any, largest: torch.Tensor) -> Tokens:
    total = numel((shape(cut.x) or ())[:-1])
    many = 1100 if largest.numel() < 50_000_000 else 300
    if not isinstance(total, torch.SymInt):
        return Tokens(int(total), 1, _from_top_k(cut.ids))
    return Tokens(None, int(total.node.expr.as_coeff_Mul()[0]), _from_top_k(cut.ids), many)


_KEEP_TOKENS = CASTS | {aten.squeeze.dim, aten.unsqueeze.default, aten.clone.default, aten.detach.default, aten.slice.Tensor}


def _from_top_k(ids: Any) -> bool:
    """Whether the ids are positions of a top-k (or sort) along their own dim: then no expert comes twice in a token."""
    while is_call(ids, _KEEP_TOKENS) or is_call(ids, VIEWS) and _last(ids) == _last(ids.args[0]):
        ids = ids.args[0]
    source = getitem_source(ids)
    if source is None or source[1] != 1 or not is_call(source[0], {aten.topk.default, aten.sort.default}):
        return False
    call: Any = source[0]
    at = 2 if is_call(call, {aten.topk.default}) else 1
    dim = call.args[at] if len(call.args) > at else call.kwargs.get("dim", -1)
    return dim in (-1, len(shape(call.args[0]) or ()) - 1)


def _last(node: fx.Node) -> Any:
    return (shape(node) or ())[-1:]


_KEEP_SIGN = CASTS | {
    aten.gather.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.index.Tensor,
    aten.sum.dim_IntList,
    aten.clamp_min.default,
}
_MAKE_NONNEGATIVE = {
    aten.softmax.int,
    aten._softmax.default,
    aten.sigmoid.default,
    aten.relu.default,
    aten.abs.default,
    aten.exp.default,
    aten.softplus.default,
}


def nonnegative(node: Any) -> bool:
    """Whether no value of the node is negative, as its ops show: a softmax or sigmoid, chosen from, divided by its sum, scaled."""
    if isinstance(node, (int, float)):
        return node >= 0
    node = through_views(node, CASTS)
    source = getitem_source(node)
    if source is not None:
        return (
            source[1] == 0 and is_call(source[0], {aten.topk.default, aten.sort.default, aten.max.dim}) and nonnegative(source[0].args[0])
        )
    if is_call(node, _MAKE_NONNEGATIVE):
        return True
    if is_call(node, _KEEP_SIGN):
        return nonnegative(node.args[0])
    if is_call(node, {aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor}):
        return all(nonnegative(a) for a in node.args)
    return False


def _weights(ids: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Both signs, some of them zero and some tiny: a threshold inside the region shows."""
    weights = torch.randn(ids.shape, generator=generator)
    kind = torch.rand(ids.shape, generator=generator)
    weights = torch.where(kind < 0.1, torch.zeros(()), weights)
    return torch.where(kind > 0.9, weights * 1e-2, weights)


def _facing(weight: torch.Tensor, hidden: int) -> torch.Tensor:
    """The weight with the hidden size last (for its dtype, spread and size only)."""
    if weight.shape[-1] == hidden:
        return weight
    return (
        weight.new_empty(0, hidden).copy_(weight.flatten()[:0].view(0, hidden)) if weight.numel() % hidden else weight.reshape(-1, hidden)
    )


def _example(node: fx.Node, rows: torch.Tensor) -> torch.Tensor:
    """Rows [T, H] in the rank of `node`, with the leading sizes the trace fixed."""
    sizes = shape(node) or ()
    if len(sizes) == 2:
        return rows
    lead = [s if isinstance(s, int) else -1 for s in sizes[:-1]]
    if lead.count(-1) > 1:
        lead = [1] * (len(lead) - 1) + [rows.shape[0]]
    return rows.view(*lead, rows.shape[-1]) if rows.numel() else rows.view(*[1] * (len(lead) - 1), 0, rows.shape[-1])


def _reshape(node: fx.Node, table: torch.Tensor) -> torch.Tensor:
    rank = len(shape(node) or ())
    if rank == 1:
        return table.reshape(-1)
    return table if rank == 2 else table.view(1, *table.shape)


def outputs_differ(got: Any, want: Any) -> tuple[float, float]:
    """(largest absolute error, largest row error relative to the row) over every tensor of two equal structures."""
    a, spec = pytree.tree_flatten(got)
    b, other = pytree.tree_flatten(want)
    if spec != other:
        return float("inf"), float("inf")
    absolute = relative = 0.0
    for x, y in zip(a, b, strict=True):
        if isinstance(y, torch.Tensor) and (not isinstance(x, torch.Tensor) or x.dtype != y.dtype or x.shape != y.shape):
            return float("inf"), float("inf")
        if isinstance(y, torch.Tensor) and y.is_floating_point():
            relative = max(
                relative,
                error_of(x.reshape(-1, x.shape[-1]) if x.dim() else x.view(1, 1), y.reshape(-1, y.shape[-1]) if y.dim() else y.view(1, 1)),
            )
            absolute = max(absolute, float((x.double() - y.double()).abs().nan_to_num().max()) if y.numel() else 0.0)
        elif isinstance(y, torch.Tensor) and not torch.equal(x, y) or not isinstance(y, torch.Tensor) and x != y:
            return float("inf"), float("inf")
    return absolute, relative


def block_inputs(
    example: Sequence[torch.Tensor], experts: int, top_k: int, generator: torch.Generator, more: Sequence[int] = ()
) -> Iterator[list[torch.Tensor]]:
    """Inputs of the whole block, after the example's shapes: one token, a few, enough for every expert, identical tokens, and `more`."""
    lead = tuple(example[0].shape[:-1])
    for tokens, same in ((1, False), (5, False), (_enough(experts, top_k), False), (16, True), *((n, False) for n in more)):
        yield [_like_example(e, lead, tokens, same, generator) for e in example]


def _enough(experts: int, top_k: int) -> int:
    return min(1024, max(64, 8 * -(-experts // max(1, top_k))))


def _like_example(example: torch.Tensor, lead: tuple[int, ...], tokens: int, same: bool, generator: torch.Generator) -> torch.Tensor:
    """A tensor like `example` whose leading dims, those of the hidden states, hold `tokens` tokens."""
    count = next((n for n in range(len(lead), 0, -1) if tuple(example.shape[:n]) == lead[:n]), 0)
    sizes = (*[1] * (count - 1), tokens, *example.shape[count:]) if count else tuple(example.shape)
    if example.dtype == torch.bool:
        return (torch.rand(sizes, generator=generator) < 0.7).to(example.device)
    if not example.is_floating_point():
        high = int(example.max()) + 1 if example.numel() else 1
        return torch.randint(0, high, sizes, generator=generator).to(example)
    x = torch.randn(sizes, generator=generator)
    if same and count:
        x = x[..., :1, :].expand_as(x).contiguous() if x.dim() > count else x[..., :1].expand_as(x).contiguous()
    return x.to(example)
