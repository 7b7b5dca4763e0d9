"""When may two blocks share one trace? When everything that is no tensor value agrees: classes, names, shapes, dtypes, attributes.

Attributes count by value where they are plain data, by name where they are functions, and by identity otherwise (a config object that
all layers hold is one object). A difference too many costs a second trace; one too few would be a wrong result, so nothing is left out.
"""

from __future__ import annotations

import types
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

_TORCH_STATE = frozenset(vars(nn.Module()))
"""What every module carries for torch itself (hooks, training, the dicts of parameters and modules)."""


def signature(block: nn.Module) -> Hashable:
    """Equal for two blocks only if a trace of one holds for the other on the other's tensors."""
    first: dict[int, int] = {}
    named = [*block.named_parameters(remove_duplicate=False), *block.named_buffers(remove_duplicate=False)]
    ties = tuple(first.setdefault(id(t), i) for i, (_, t) in enumerate(named))
    modules = tuple((name, type(module), module.training, _tensors(module), _attributes(module)) for name, module in block.named_modules())
    return modules, ties


def _tensors(module: nn.Module) -> Hashable:
    named = [*module._parameters.items(), *module._buffers.items()]
    return tuple((n, None if t is None else (tuple(t.shape), t.dtype, t.device, t.stride())) for n, t in named)


def _attributes(module: nn.Module) -> Hashable:
    return tuple((k, _plain(v)) for k, v in sorted(module.__dict__.items()) if k not in _TORCH_STATE)


def _plain(value: Any) -> Hashable:
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)):
        return (type(value), value)
    if isinstance(value, (list, tuple)):
        return (type(value), tuple(_plain(v) for v in value))
    if isinstance(value, dict):
        return (dict, tuple((_plain(k), _plain(v)) for k, v in value.items()))
    if isinstance(value, types.FunctionType) and value.__closure__ is None:
        defaults = value.__defaults__ if _hashable(value.__defaults__) else id(value)
        return (id(value.__code__), id(value.__globals__), id(value.__kwdefaults__), defaults)
    return (type(value), id(value))


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
