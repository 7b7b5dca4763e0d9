"""Expert parallelism over a process group: who owns what, and the ops that move tokens between ranks.

`all_reduce(part, group)`: every rank passed the same tokens, the partial sums are added. `dispatch`/`combine`: every rank passed its own
tokens; a token goes once to each rank that owns one of its experts, and its partial sums come back.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from moefx import ops


def ranks(group: Any, ep_size: int) -> Any:
    """This process's `Ranks`, or None when no process group is initialised; ValueError when the group's size is not ep_size."""
    from moefx.rewrite import Ranks

    ready = dist.is_available() and dist.is_initialized()
    if group is not None and not ready:
        raise ValueError(
            "a process group was given but torch.distributed is not initialised; call torch.distributed.init_process_group first"
        )
    if not ready or (group is None and ep_size == 1 and dist.get_world_size() == 1):
        return None
    group = group if group is not None else dist.group.WORLD
    size = dist.get_world_size(group)
    if size != ep_size:
        raise ValueError(f"ep_size={ep_size} but the process group has {size} processes; pass ep_size={size}, or a group of {ep_size}")
    return None if size == 1 else Ranks(dist.get_rank(group), group.group_name)


def all_agree(passed: bool, group_name: str) -> bool:
    """True on every rank when it is true on all: ranks keep or drop a rewrite together."""
    flag = torch.tensor([1.0 if passed else 0.0])
    return bool(_wait(torch.ops._c10d_functional.all_reduce(flag, "min", group_name)).item() == 1.0)


def _wait(tensor: torch.Tensor) -> torch.Tensor:
    return torch.ops._c10d_functional.wait_tensor(tensor)


def all_reduce(part: torch.Tensor, group_name: str) -> torch.Tensor:
    """The sum of every rank's `part` [T, H]; half types are added in fp32 and rounded once."""
    wide = part.float() if part.dtype in (torch.bfloat16, torch.float16) else part
    return _wait(torch.ops._c10d_functional.all_reduce(wide, "sum", group_name)).to(part.dtype)


def _exchange(rows: torch.Tensor, send: list[int], receive: list[int], group_name: str) -> torch.Tensor:
    return _wait(torch.ops._c10d_functional.all_to_all_single(rows.contiguous(), receive, send, group_name))


def _dispatch(x, ids, weights, experts_per_rank, group_name):
    size = torch.distributed.distributed_c10d._resolve_process_group(group_name).size()
    owner = torch.div(ids, experts_per_rank, rounding_mode="floor").clamp_max(size - 1)
    wanted = torch.zeros(ids.shape[0], size, dtype=torch.bool, device=x.device).scatter_(1, owner, True)
    to_rank, token = wanted.t().nonzero(as_tuple=True)
    send = torch.bincount(to_rank, minlength=size)
    receive = _exchange(send, [1] * size, [1] * size, group_name)
    s, r = send.tolist(), receive.tolist()
    return (*(_exchange(t.index_select(0, token), s, r, group_name) for t in (x, ids, weights)), token, send, receive)


def _dispatch_fake(x, ids, weights, experts_per_rank, group_name):
    context = torch.library.get_ctx()
    received, sent = context.new_dynamic_size(), context.new_dynamic_size()
    size = torch.distributed.distributed_c10d._resolve_process_group(group_name).size()
    long = {"dtype": torch.int64, "device": x.device}
    return (
        x.new_empty(received, x.shape[1]),
        ids.new_empty(received, ids.shape[1]),
        weights.new_empty(received, weights.shape[1]),
        torch.empty(sent, **long),
        torch.empty(size, **long),
        torch.empty(size, **long),
    )


dispatch = ops.define(
    "dispatch(Tensor x, Tensor ids, Tensor weights, int experts_per_rank, str group_name)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _dispatch,
    _dispatch_fake,
)
"""x [T, H], ids [T, K], weights [T, K] -> (x [R, H], ids [R, K], weights [R, K], token [sent], send [ranks], receive [ranks] counts).

A token's whole row of ids goes along; the rank skips the ids it does not own (`first` of the experts op). The last rank owns the ids past
ranks * experts_per_rank (shared slots)."""


def _combine(y, token, send, receive, tokens, group_name):
    back = _exchange(y, receive.tolist(), send.tolist(), group_name)
    wide = torch.promote_types(y.dtype, torch.float32)
    return torch.zeros(tokens, y.shape[1], dtype=wide, device=y.device).index_add_(0, token, back.to(wide)).to(y.dtype)


def _combine_fake(y, token, send, receive, tokens, group_name):
    return y.new_empty(tokens, y.shape[1])


combine = ops.define(
    "combine(Tensor y, Tensor token, Tensor send, Tensor receive, SymInt tokens, str group_name) -> Tensor", _combine, _combine_fake
)
"""y [R, H], what `dispatch` returned behind it, tokens T -> [T, H]: each token's partial sums, added."""
