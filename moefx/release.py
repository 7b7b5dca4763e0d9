"""Free the weights that only a pack reads (`inplace=True`): their values live on in the pack, from which they can be made again.

A released parameter keeps its name, shape and dtype and has no memory (it is on the meta device). `state_dict()` gives the original
values, `load_state_dict()` and a call that needs the block as it was bring the parameters back first.
"""

from __future__ import annotations

import gc
import itertools
import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.multiprocessing.reductions import StorageWeakRef

from moefx import swap
from moefx.kernels.base import Kernel
from moefx.packs import Pack
from moefx.swap import BlockForward


class Taken(NamedTuple):
    """One packing call of a kernel.

    `rows`: the experts in each part of its weights, `inputs`: the tensors of all parts; `places`: where what it makes is in the pack.
    """

    kernel: Kernel
    hidden: int
    width: int
    activation: str
    rows: tuple[int, ...]
    inputs: int
    places: tuple[int | None, ...]

    def given(self, packed: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What the call took, part by part."""
        return [v for begin, end in self._ranges() for v in self._unpacked(packed, begin, end)]

    def took(self, packed: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> bool:
        """Whether that is `given`, bit for bit; an expert at a time, since all of them at once are another layer in memory."""
        apart = all(packed[p].shape[0] == sum(self.rows) for p in self.places if p is not None)
        kinds = len(given) // len(self.rows)
        for i, (begin, end) in enumerate(self._ranges()):
            part, step = given[i * kinds : (i + 1) * kinds], 1 if apart else end - begin
            for e in range(begin, end, step):
                if not _same(self._unpacked(packed, e, e + step), [t[e - begin : e - begin + step] for t in part]):
                    return False
        return True

    def _ranges(self) -> list[tuple[int, int]]:
        return list(itertools.pairwise(itertools.accumulate(self.rows, initial=0)))

    def _unpacked(self, packed: Sequence[torch.Tensor], begin: int, end: int) -> list[torch.Tensor]:
        """What there is of (w13, b13, w2, b2) of the experts [begin, end)."""
        assert self.kernel.unpack is not None
        tensors = [None if p is None else packed[p] for p in self.places]
        if end - begin < sum(self.rows):
            tensors = [None if t is None else t[begin:end] for t in tensors]
        return [v for v in self.kernel.unpack(tuple(tensors), self.hidden, self.width, self.activation) if v is not None]


class WayBack:
    """From packed tensors to the sources, through the transpose of what led from the sources to the kernel's packing function.

    `before`: sources -> what each of the packing `calls` takes, then what the pack only moved (at `others` in the pack); data movement
    alone.
    """

    def __init__(self, before: fx.GraphModule, calls: Sequence[Taken], others: Sequence[int]):
        self.before, self.calls, self.others = before, list(calls), list(others)

    def __call__(self, packed: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The sources, shaped and typed as `like`."""
        values = [v for call in self.calls for v in call.given(packed)] + [packed[i] for i in self.others]
        return self._transposed(values, like)

    def leads_to(self, sources: Sequence[torch.Tensor], packed: Sequence[torch.Tensor]) -> bool:
        """Whether the way back gives `sources` bit for bit."""
        taken = [t.detach() for t in self.before(*sources)]
        left = list(taken)
        for call in self.calls:
            given, left = left[: call.inputs], left[call.inputs :]
            if not call.took(packed, given):
                return False
        return _same([packed[i] for i in self.others], left) and _same(self._transposed(taken, sources), sources)

    def _transposed(self, values: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        nodes = list(self.before.graph.nodes)
        if all(n.op in ("placeholder", "output") for n in nodes):  # nothing but the order of the arguments
            by_source: dict[Any, torch.Tensor] = dict(zip(nodes[-1].args[0], values, strict=True))
            return [by_source[n] for n in nodes[:-1]]
        zeros = [torch.zeros((), dtype=t.dtype).expand(t.shape) for t in like]
        return list(torch.func.vjp(self.before, *zeros)[1](tuple(values)))


def _same(made: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    return all(a.shape == b.shape and torch.equal(_bits(a), _bits(b)) for a, b in zip(made, wanted, strict=True))


def release(model: nn.Module, block: nn.Module, forward: BlockForward, kernel: Kernel) -> str | None:
    """Free the sources of the block's pack. None, or why nothing was changed: the values could not be given back, bit for bit."""
    pack = forward.pack
    assert pack is not None
    way_back = _way_back(pack)
    if way_back is None:
        return f"{kernel.name} rounds them, so their values can't be made again" if kernel.lossy else f"{kernel.name} has no way back"
    if _shared(model, forward, pack):
        return "something besides the pack reads them"
    sources = [ref() for ref in pack.sources]
    with torch.no_grad():
        if not way_back.leads_to(sources, pack()):
            return "the pack does not give their values back bit for bit"
    storages = [StorageWeakRef(t.untyped_storage()) for t in sources]
    del sources
    pack.hold(way_back)
    if not all(s.expired() for s in storages):  # torch.export leaves the weights of the block it traced in reference cycles
        gc.collect()
    for module in block.modules():
        if any(ref.owner in set(module.modules()) for ref in pack.sources):
            module.register_state_dict_post_hook(_Values(pack, block))
            module.register_load_state_dict_pre_hook(_Restored(pack))
            module.__dict__["_apply"] = _RestoredFirst(pack, module)
    return None


def undo(model: nn.Module) -> None:
    """Every rewritten block of the model as it was before, its freed weights back."""
    for _, forward in swap.swapped(model):
        forward.block.__dict__.pop("forward", None)
        if forward.pack is not None:
            forward.pack.restore()
    for module in model.modules():
        module.__dict__.pop("_apply", None) if isinstance(module.__dict__.get("_apply"), _RestoredFirst) else None
        for hooks in (module._state_dict_hooks, module._load_state_dict_pre_hooks):
            for key in [k for k, hook in hooks.items() if isinstance(getattr(hook, "hook", hook), (_Values, _Restored))]:
                del hooks[key]


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
    given = [_given(call) for call in calls]
    before.output(tuple(mapping[a] for a in [a for each in given for part in each for a in part] + moved))
    before.eliminate_dead_code()
    module = fx.GraphModule({}, before)
    shapes = iter([t.shape for t in module(*[torch.empty(ref().shape, dtype=ref().dtype, device="meta") for ref in pack.sources])])
    taken = []
    for call, each in zip(calls, given, strict=True):
        sizes = [[next(shapes) for _ in part] for part in each]
        _, hidden, width = next(s for s in reversed(sizes[0]) if len(s) == 3)
        rows = tuple(part[0][0] for part in sizes)
        kernel = kernels[call.target]
        taken.append(Taken(kernel, hidden, width, str(call.args[4]), rows, sum(map(len, each)), _places(call, kernel, outputs)))
    return WayBack(module, taken, [outputs.index(n) for n in moved])


def _given(call: fx.Node) -> list[list[Any]]:
    """What there is of (w13, b13, w2, b2) in each part of a packing call's weights."""
    given = [a if isinstance(a, (list, tuple)) else [a] for a in call.args[:4] if a is not None]
    return [list(part) for part in zip(*given, strict=True)]


def _places(call: fx.Node, kernel: Kernel, outputs: list[Any]) -> tuple[int | None, ...]:
    """Where each tensor that a packing call makes is among the pack's."""
    at = {n.args[1]: outputs.index(n) for n in call.users if n in outputs}
    op: Any = kernel.op
    between = len(op._schema.arguments) - len(("x", "ids", "weights", "activation", "first"))
    return tuple(at.get(i) for i in range(between))


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


class _Values:
    """A state_dict hook that puts the values in the place of released parameters: of the block, or of the part of it that is asked."""

    def __init__(self, pack: Pack, block: nn.Module) -> None:
        self.pack, self.block = pack, block

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, local: Any) -> None:
        del local
        if module is not self.block and prefix:  # asked on the way to a state_dict of the whole: the block's own hook will do it once
            return
        names = {(id(m), name): f"{path}.{name}".lstrip(".") for path, m in module.named_modules() for name in m._parameters}
        for ref, value in self.pack.values():
            if (id(ref.owner), ref.name) in names:
                state[prefix + names[id(ref.owner), ref.name]] = value


class _Restored:
    """A load_state_dict hook that brings released parameters back before they are written."""

    def __init__(self, pack: Pack) -> None:
        self.pack = pack

    def __call__(self, *arguments: Any) -> None:
        self.pack.restore()


class _RestoredFirst:
    """A module's `_apply` (`.to()`, `.half()`, `share_memory()`) that brings released parameters back before it converts them."""

    def __init__(self, pack: Pack, module: nn.Module) -> None:
        self.pack, self.module = pack, module

    def __call__(self, *arguments: Any, **named: Any) -> nn.Module:
        self.pack.restore()
        return type(self.module)._apply(self.module, *arguments, **named)
