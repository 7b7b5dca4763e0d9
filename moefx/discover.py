"""Find the modules of a model that look like a mixture-of-experts layer, by their weights alone.

Experts are a stack (a 3-D parameter [E, ., .] and another with the same E in one module) or a list (a ModuleList of alike modules with
two or more matrices each). The block is the smallest module around them that also holds a router: a matrix with E rows (or columns).
A candidate costs a trace; what the trace shows decides.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from dataclasses import dataclass, replace

import torch
from torch import nn


@dataclass(frozen=True)
class Candidate:
    """A module to trace. `hidden` and `dtype` describe its input; `experts` is E, `top_k` a guess from the module's attributes.

    `inner`: the experts' own module, to trace when the block around it can't be (a router beside the attention of a decoder layer).
    """

    name: str
    module: nn.Module
    experts: int
    hidden: int | None
    dtype: torch.dtype
    top_k: int | None
    inner: Candidate | None = None


def find(model: nn.Module) -> list[Candidate]:
    """Candidates in module order, none inside another."""
    parents = {child: (name.rpartition(".")[0]) for name, child in model.named_modules()}
    modules = dict(model.named_modules())
    names = {m: n for n, m in modules.items()}
    found: dict[str, Candidate] = {}
    for module in modules.values():
        experts = _stacked_experts(module) or _listed_experts(module)
        if experts is None:
            continue
        block = _with_router(module, experts, modules, parents, names)
        block_name = names[block]
        if block_name not in found and not any(block_name == n or block_name.startswith(n + ".") or n == "" for n in found):
            inner = None if block is module else _candidate(names[module], module, experts, module)
            found[block_name] = replace(_candidate(block_name, block, experts, module), inner=inner)
    return [c for n, c in found.items() if not any(o != n and (n.startswith(o + ".") or o == "") for o in found)]


def _stacked_experts(module: nn.Module) -> int | None:
    """E when the module holds two or more parameters [E, a, b] (also one in each of several submodules), or flat ones [E * D, H]."""
    counts: dict[int, int] = defaultdict(int)
    for parameter in [*module.parameters(recurse=False), *_single_parameters(module)]:
        if parameter.dim() == 3 and parameter.shape[0] > 1:
            counts[parameter.shape[0]] += 1
    best = max(counts, key=lambda e: counts[e], default=None)
    if best is not None and counts[best] >= 2:
        return best
    flat = [p for p in module.parameters(recurse=False) if p.dim() == 2]
    for attribute in ("moe_num_experts", "num_experts", "num_local_experts", "n_experts"):
        experts = getattr(module, attribute, None)
        if (
            isinstance(experts, int)
            and experts > 1
            and len(flat) >= 2
            and len({p.shape for p in flat}) == 1
            and flat[0].shape[0] % experts == 0
            and flat[0].shape[0] > experts
        ):
            return experts
    return None


def _single_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of children that hold one stacked weight each (a module per product)."""
    found = []
    for child in module.children():
        stacked = [p for p in child.parameters(recurse=False) if p.dim() == 3]
        if len(stacked) == 1 and not any(True for _ in child.children()):
            found += stacked
    return found


def _listed_experts(module: nn.Module) -> int | None:
    """E when the module is a list (or dict) of alike modules, each with two or more matrices."""
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        return None
    children = list(module.values()) if isinstance(module, nn.ModuleDict) else list(module)
    if len(children) < 2 or len({type(c) for c in children}) != 1:
        return None
    shapes = [tuple((n, tuple(p.shape)) for n, p in c.named_parameters()) for c in children]
    matrices = [s for _, s in shapes[0] if len(s) == 2]
    deep = any(len(s) > 2 for _, s in shapes[0])
    return len(children) if len(set(shapes)) == 1 and len(matrices) in (2, 3) and not deep else None


def _with_router(
    module: nn.Module, experts: int, modules: dict[str, nn.Module], parents: dict[nn.Module, str], names: dict[nn.Module, str]
) -> nn.Module:
    """The smallest module from `module` up that has a router and runs on hidden states; `module`'s parent when none is near."""
    node = module
    for _ in range(4):
        if not isinstance(node, (nn.ModuleList, nn.ModuleDict, nn.Sequential)) and _has_router(node, module, experts):
            return node
        if names[node] == "":
            break
        node = modules[parents[node]]
    return modules[parents[module]] if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and names[module] != "" else module


def _has_router(node: nn.Module, experts_module: nn.Module, experts: int) -> bool:
    """A matrix with E rows or columns outside the experts; beside stacked ones only in a submodule or so named (a bias is [E, .] too)."""
    own = {id(p) for p in experts_module.parameters(recurse=node is not experts_module)}
    sizes = {s for p in experts_module.parameters() for s in p.shape}
    for name, parameter in node.named_parameters():
        named = "router" in name or name in ("gate", "gate_weight", "wg")
        if parameter.dim() == 2 and experts in parameter.shape and (id(parameter) not in own or named):
            other = parameter.shape[1] if parameter.shape[0] == experts else parameter.shape[0]
            if other in sizes:
                return True
    return False


def _candidate(name: str, block: nn.Module, experts: int, holder: nn.Module) -> Candidate:
    dtype = next((p.dtype for p in holder.parameters() if p.is_floating_point()), torch.float32)
    return Candidate(name, block, experts, _hidden_size(block, experts, holder), dtype, _top_k(block))


def _hidden_size(block: nn.Module, experts: int, holder: nn.Module) -> int | None:
    """The router's other size: what is in common with the expert weights."""
    inside = {id(p) for p in holder.parameters()} if holder is not block else set()
    sizes = {s for p in holder.parameters() for s in p.shape}
    for parameter in block.parameters():
        if id(parameter) not in inside and parameter.dim() == 2 and experts in parameter.shape:
            other = parameter.shape[1] if parameter.shape[0] == experts else parameter.shape[0]
            if other in sizes:
                return int(other)
    for attribute in ("hidden_size", "hidden_dim", "d_model"):
        value = (
            getattr(block, attribute, None) or getattr(getattr(block, "config", None), attribute, None) or getattr(holder, attribute, None)
        )
        if isinstance(value, int):
            return value
    return None


def _top_k(block: nn.Module) -> int | None:
    for module in block.modules():
        for attribute in ("top_k", "num_experts_per_tok", "topk", "moe_top_k", "k"):
            value = getattr(module, attribute, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


_IDS = ("top_k_index", "topk_ids", "expert_ids", "selected_experts", "router_indices")
_WEIGHTS = ("top_k_weights", "topk_weights", "routing_weights")


def example_arguments(candidate: Candidate, rank: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Inputs synthesised from the weights: hidden states, and token ids where the forward takes them; ValueError says what is unknown."""
    if candidate.hidden is None:
        raise ValueError("its hidden size could not be read from its weights; pass example_inputs")
    parameters = list(inspect.signature(type(candidate.module).forward).parameters.values())[1:]
    routed = any(p.name in _IDS for p in parameters)
    lead = (2, 7) if rank == 3 and not routed else (14,)
    made: dict[str, torch.Tensor] = {}
    for position, parameter in enumerate(parameters):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if position == 0:
            made[parameter.name] = torch.randn(*lead, candidate.hidden).to(device=device, dtype=candidate.dtype)
        elif parameter.name in _IDS:
            made[parameter.name] = (
                torch.rand(14, candidate.experts, device=device).topk(min(candidate.top_k or 2, candidate.experts)).indices
            )
        elif parameter.name in _WEIGHTS:
            made[parameter.name] = torch.rand(14, min(candidate.top_k or 2, candidate.experts), device=device).to(candidate.dtype)
        elif parameter.name == "input_ids":
            made[parameter.name] = torch.randint(0, _vocabulary(candidate.module), lead, device=device)
        elif parameter.default is parameter.empty:
            raise ValueError(f"its forward also takes {parameter.name!r}; pass example_inputs")
    return made


def _vocabulary(block: nn.Module) -> int:
    """Rows of the block's token table, 2 when it has none."""
    tables = [
        b
        for m in block.modules()
        for b in [*m._buffers.values(), *m._parameters.values()]
        if b is not None and not b.is_floating_point() and b.dim() == 2
    ]
    return max((t.shape[0] for t in tables), default=2)
