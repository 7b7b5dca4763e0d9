"""Free the weights that only a pack reads (`inplace=True`): their values live on in the pack, from which they can be made again.

A released parameter keeps its name, shape and dtype and has no memory (it is on the meta device). `state_dict()` gives the original
values, `load_state_dict()` and a call that needs the block as it was bring the parameters back first.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from moefx.kernels.base import Kernel
from moefx.swap import BlockForward, Pack


class WayBack:
    """From packed tensors to the sources, through the transpose of what led from the sources to the kernel's packing function.

    `before`: sources -> what each packing call takes, then what the pack only moved; data movement alone. `calls`: the (kernel, H, D,
    activation) of each packing call, `places` where its tensors are among the pack's, `others` where those only moved are.
    """

    def __init__(
        self,
        before: fx.GraphModule,
        others: Sequence[int],
        calls: Sequence[tuple[Kernel, int, int, str]],
        places: Sequence[tuple[int | None, ...]],
    ):
        self.before, self.others, self.calls, self.places = before, list(others), list(calls), list(places)

    def __call__(self, packed: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The sources, shaped and typed as `like`."""
        values: list[torch.Tensor] = []
        for (kernel, hidden, width, activation), places in zip(self.calls, self.places, strict=True):
            assert kernel.unpack is not None
            found = kernel.unpack(tuple(None if p is None else packed[p] for p in places), hidden, width, activation)
            values += [v for v in found if v is not None]
        values += [packed[i] for i in self.others]
        nodes = list(self.before.graph.nodes)
        if self._takes_sources():  # nothing but the order of the arguments
            by_source: dict[Any, torch.Tensor] = dict(zip(nodes[-1].args[0], values, strict=True))
            return [by_source[n] for n in nodes[:-1]]
        zeros = [torch.zeros((), dtype=t.dtype).expand(t.shape) for t in like]
        transpose = torch.func.vjp(self.before, *zeros)[1]
        return list(transpose(tuple(values)))

    def leads_to(self, sources: Sequence[torch.Tensor], packed: Sequence[torch.Tensor]) -> bool:
        """Whether the way back gives `sources` bit for bit; an expert at a time where packing took them as they are."""
        if not self._takes_sources() or len(self.calls) > 1 or self.others:
            return _same(self(packed, sources), sources)
        experts = sources[0].shape[0]
        if any(t.shape[0] != experts for t in [*sources, *packed]):
            return _same(self(packed, sources), sources)
        each = [([t[e : e + 1] for t in packed], [t[e : e + 1] for t in sources]) for e in range(experts)]
        return all(_same(self([t.contiguous() for t in part], wanted), wanted) for part, wanted in each)

    def _takes_sources(self) -> bool:
        return all(n.op in ("placeholder", "output") for n in self.before.graph.nodes)


def _same(made: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    return all(a.shape == b.shape and torch.equal(_bits(a), _bits(b)) for a, b in zip(made, wanted, strict=True))


def release(model: nn.Module, block: nn.Module, forward: BlockForward) -> int:
    """Free the sources of the block's pack; returns the bytes. 0, and nothing changed, where the way back is not bit for bit the same."""
    pack = forward.pack
    way_back = _way_back(pack) if pack is not None else None
    if pack is None or way_back is None or _shared(model, forward, pack):
        return 0
    sources = [ref() for ref in pack.sources]
    with torch.no_grad():
        if not way_back.leads_to(sources, pack()):
            return 0
    freed = sum(t.numel() * t.element_size() for t in sources)
    del sources
    pack.hold(way_back)
    block.register_state_dict_post_hook(_Values(pack))
    block.register_load_state_dict_pre_hook(_Restored(pack))
    return freed


def _shared(model: nn.Module, forward: BlockForward, pack: Pack) -> bool:
    """Whether something else reads a source too: the graph itself, or another module."""
    own = {(id(ref.owner), ref.name) for ref in pack.sources}
    if any(ref.rows is not None or ref.name not in ref.owner._parameters for ref in pack.sources):
        return True
    if any((id(ref.owner), ref.name) in own for ref in forward.refs):
        return True
    holders = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    return any(holders[id(ref())] != 1 for ref in pack.sources)


def _way_back(pack: Pack) -> WayBack | None:
    """None where a packing function has no inverse, or the pack computes something besides."""
    from moefx.kernels.registry import KERNELS

    kernels: dict[Any, Kernel] = {k.pack: k for k in KERNELS if k.unpack is not None}
    nodes = list(pack.function.graph.nodes)
    outputs = list(nodes[-1].args[0])
    calls = [n for n in nodes if n.op == "call_function" and n.target in kernels]
    parts = {n for n in nodes if n.target is operator.getitem and n.args[0] in calls}
    moved = [n for n in outputs if n not in parts]
    if not calls or set(moved) & set(calls):
        return None
    before = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node not in parts and node not in calls and node.op != "output":
            mapping[node] = before.node_copy(node, mapping.__getitem__)
    before.output(tuple(mapping[a] for a in [a for call in calls for a in call.args[:4] if a is not None] + moved))
    before.eliminate_dead_code()
    places = []
    for call in calls:
        at = {n.args[1]: outputs.index(n) for n in parts if n.args[0] is call and n in outputs}
        op: Any = kernels[call.target].op
        between = len(op._schema.arguments) - len(("x", "ids", "weights", "activation", "first"))
        places.append(tuple(at.get(i) for i in range(between)))
    others = [outputs.index(n) for n in moved]
    return WayBack(fx.GraphModule({}, before), others, [(kernels[c.target], *_sizes(c, pack), str(c.args[4])) for c in calls], places)


def _sizes(call: fx.Node, pack: Pack) -> tuple[int, int]:
    """(H, D) of a packing call, from the second weight it takes."""
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    wanted: Any = call.args[2]
    for node in pack.function.graph.nodes:
        mapping[node] = graph.node_copy(node, mapping.__getitem__)
        if node is wanted:
            break
    graph.output(mapping[wanted])
    with torch.device("meta"):
        shapes = [torch.empty(ref().shape, dtype=ref().dtype) for ref in pack.sources]
    needed = [n for n in graph.nodes if n.op == "placeholder"]
    _, hidden, width = fx.GraphModule({}, graph)(*shapes[: len(needed)]).shape
    return hidden, width


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


class _Values:
    """A state_dict hook that puts the values in the place of released parameters."""

    def __init__(self, pack: Pack) -> None:
        self.pack = pack

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, local: Any) -> None:
        del local
        names = {(id(m), name): f"{path}.{name}".lstrip(".") for path, m in module.named_modules() for name in m._parameters}
        for ref, value in self.pack.values():
            state[prefix + names[id(ref.owner), ref.name]] = value


class _Restored:
    """A load_state_dict hook that brings released parameters back before they are written."""

    def __init__(self, pack: Pack) -> None:
        self.pack = pack

    def __call__(self, *arguments: Any) -> None:
        self.pack.restore()
