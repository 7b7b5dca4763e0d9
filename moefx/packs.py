"""Weights by where they lie, and what is packed from them: kept until a weight changes, or in their place for good."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from moefx.errors import ParameterFreedError, WeightGoneError

_CHANGES = threading.RLock()
"""Held while weights are packed, freed or brought back; calls that find a pack as it should be do without."""
_UNCOUNTED: dict[int, int] = {}
"""Writes that torch's fused optimizers made without counting a version, by storage."""


def _note_fused_step(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
    del arguments
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("fused") else ():
            storage = parameter.untyped_storage()._cdata
            _UNCOUNTED[storage] = _UNCOUNTED.get(storage, 0) + 1


register_optimizer_step_post_hook(_note_fused_step)


class WeightRef:
    """A parameter or buffer by its module's dict and its name: what it is now, not what it was.

    `rows`: the [first, end) of it that is meant, until the parameter itself holds only those.
    """

    def __init__(self, block: nn.Module, qualified: str, rows: tuple[int, int] | None = None):
        path, _, self.name = qualified.rpartition(".")
        self.owner = block.get_submodule(path)
        self.rows = rows

    def __call__(self) -> torch.Tensor:
        found = self.find()
        if found is None:
            raise WeightGoneError(f"weight {self.name!r} is no parameter or buffer of its module any more")
        return found if self.rows is None else found[self.rows[0] : self.rows[1]]

    def find(self) -> torch.Tensor | None:
        """The whole of it, None where its module has it no more (pruned, parametrised, deleted)."""
        found = self.owner._parameters.get(self.name)
        return found if found is not None else self.owner._buffers.get(self.name)


class Pack:
    """Tensors computed from weights, kept until a weight changes (identity, version or storage).

    A change through `.data` or numpy that bumps no version is not seen: call `moefx.swap.invalidate(model)` after such a write.
    """

    def __init__(self, function: fx.GraphModule, sources: Sequence[WeightRef]):
        self.function = function
        self.sources = list(sources)
        self._key: tuple[Any, ...] | None = None
        self._packed: tuple[torch.Tensor, ...] = ()
        self._seen: list[weakref.ref[torch.Tensor]] = []
        self._storages: list[StorageWeakRef] = []
        self._way_back: Callable[..., list[torch.Tensor]] | None = None

    def __call__(self) -> tuple[torch.Tensor, ...]:
        tensors = [s() for s in self.sources]
        if self._way_back is not None:
            self._check_unwritten()
            if all(t.is_meta and t.dtype == dtype for t, dtype in zip(tensors, self._dtypes, strict=True)):
                return self._packed
            self.restore()
            tensors = [s() for s in self.sources]
        if any(t.is_inference() for t in tensors):  # torch counts no versions of these: a kept pack could be stale
            return self._made(tensors)
        key = _key(tensors)
        if key != self._key or self._replaced(tensors):
            with _CHANGES:
                self._key = None
                self._packed = self._made(tensors)
                self._seen = [weakref.ref(t) for t in tensors]
                self._storages = [StorageWeakRef(t.untyped_storage()) for t in tensors]
                self._key = key
        return self._packed

    def _made(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Ordinary tensors, whatever mode the caller is in: they outlive the call."""
        with torch.inference_mode(False), torch.no_grad():
            return self.function(*tensors)

    def _replaced(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether a tensor or its storage is another one at an address that was freed."""
        return any(ref() is not t for ref, t in zip(self._seen, tensors, strict=False)) or any(s.expired() for s in self._storages)

    def invalidate(self) -> None:
        if self._way_back is None:
            self._key, self._packed = None, ()

    def hold(self, way_back: Callable[..., list[torch.Tensor]]) -> None:
        """Keep the packed tensors for good and free the sources; `way_back(packed, like)` makes them again.

        An interrupt at any point leaves what `restore` can undo.
        """
        with _CHANGES, torch.inference_mode(False):
            old = [ref() for ref in self.sources]
            self._packed = self()
            self._dtypes = [t.dtype for t in old]
            freed = [nn.Parameter(torch.empty_like(t, device="meta"), requires_grad=t.requires_grad) for t in old]
            self._freed = [(p, p._version) for p in freed]
            self._way_back = way_back
            for ref, parameter in zip(self.sources, freed, strict=True):
                ref.owner._parameters[ref.name] = parameter

    def _check_unwritten(self) -> None:
        for ref, freed in zip(self.sources, self._freed, strict=True):
            if ref.find() is freed[0] and freed[0]._version != freed[1]:
                raise ParameterFreedError(
                    f"{ref.name} was written in place, but inplace=True freed it and the write is lost; "
                    "call moefx.swap.restore(model) before writing, or load_state_dict"
                )

    def values(self) -> list[tuple[WeightRef, torch.Tensor]]:
        """The released sources with their values."""
        with _CHANGES, torch.inference_mode(False), torch.no_grad():
            if self._way_back is None:
                return []
            self._check_unwritten()
            found = [ref.find() for ref in self.sources]
            like = [torch.empty(f[0].shape, dtype=d, device="meta") for f, d in zip(self._freed, self._dtypes, strict=True)]
            made = self._way_back(self._packed, like)
            return [(r, value) for r, f, value in zip(self.sources, found, made, strict=True) if f is not None and f.is_meta]

    def restore(self) -> None:
        """Bring released sources back, in the type their parameters have now."""
        with _CHANGES, torch.inference_mode(False):
            for ref, value in self.values():
                old = ref()
                ref.owner._parameters[ref.name] = nn.Parameter(value.to(old.dtype), requires_grad=old.requires_grad)
            self._way_back = None

    def new_bytes(self) -> int:
        """Bytes of packed tensors that are no views of the weights."""
        if self._way_back is not None:
            return sum(p.untyped_storage().nbytes() for p in self._packed)
        own = {t.untyped_storage().data_ptr() for t in (s() for s in self.sources)}
        fresh = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in self() if p.untyped_storage().data_ptr() not in own}
        return sum(fresh.values())

    def __getstate__(self) -> dict[str, Any]:
        packed = self._packed if self._way_back is not None else ()
        return {**self.__dict__, "_key": None, "_packed": packed, "_seen": [], "_storages": []}


def _key(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    storages = [t.untyped_storage()._cdata for t in tensors]
    key = tuple([(t.data_ptr(), storage, t._version) for t, storage in zip(tensors, storages, strict=True)])
    return (*key, *(_UNCOUNTED.get(storage) for storage in storages)) if _UNCOUNTED else key
