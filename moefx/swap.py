"""Give a block its rewritten forward, and copy a model without copying its tensors.

The block, its submodules, parameters and hooks stay; only the instance's `forward` is new (`block.__dict__["forward"]`). It reads the
parameters from their modules at each call, so `.to()`, `load_state_dict` and in-place changes are seen; what was packed from them is
packed again when they changed.
"""

from __future__ import annotations

import copy
import inspect
import types
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from moefx._compat import router_logits_wanted
from moefx.errors import WeightGoneError
from moefx.packs import Pack, WeightRef


def copy_sharing_tensors(model: nn.Module) -> nn.Module:
    """A new tree of the same classes over the same parameters and buffers (ties kept, bound methods rebound)."""
    memo: dict[int, Any] = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    return copy.deepcopy(model, memo)


class BlockForward:
    """The rewritten forward of one block.

    Calls that the trace does not cover (another dtype, device or rank, other optional arguments, gradients wanted, a collector of router
    logits) run the class's own forward; the first such call of a kind warns with the reason.
    """

    def __init__(
        self,
        block: nn.Module,
        module: fx.GraphModule,
        refs: Sequence[WeightRef],
        pack: Pack | None,
        names: tuple[str, ...],
        constants: Mapping[str, Any],
        example: Mapping[str, torch.Tensor],
        flat_outputs: tuple[Any, ...],
        out_spec: pytree.TreeSpec,
        sharded: bool = False,
    ):
        self.block, self.module, self.refs, self.pack = block, module, list(refs), pack
        self.names, self.constants = names, dict(constants)
        self.kinds = {n: (t.dtype, t.dim(), t.shape[-1] if t.is_floating_point() else None) for n, t in example.items()}
        self.flat_outputs, self.out_spec = flat_outputs, out_spec
        self.single = flat_outputs == (None,) and out_spec.is_leaf()
        self.sharded = sharded
        self.calls_left_alone: dict[str, int] = {}
        inner = [m for m in block.modules() if m is not block]
        self.hooks: list[Any] = [hooks for m in inner for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self.parts = [(m, name, child) for m in block.modules() for name, child in m._modules.items() if child is not None]
        self.__signature__ = inspect.signature(types.MethodType(type(block).forward, block))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        values = self._bind(args, kwargs)
        inputs = [values[n] for n in self.names if n in self.kinds] if values is not None else []
        try:
            reason = "other arguments" if values is None else self._uncovered(values, inputs)
            if reason is None:
                weights = [ref() for ref in self.refs]
                packed = self.pack() if self.pack is not None else ()
        except WeightGoneError as error:
            reason = str(error)
        if reason is not None:
            return self._as_it_was(reason, args, kwargs)
        outputs = self.module(*weights, *packed, *inputs)
        if self.single:
            return outputs[0]
        left = iter(outputs)
        return pytree.tree_unflatten([next(left) if const is None else const[1] for const in self.flat_outputs], self.out_spec)

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        if len(args) > len(self.names) or any(k not in self.names[len(args) :] for k in kwargs):
            return None
        values = dict(self.constants)
        values.update(zip(self.names, args, strict=False))
        values.update(kwargs)
        return values if all(n in values for n in self.kinds) else None

    def _uncovered(self, values: dict[str, Any], inputs: list[Any]) -> str | None:
        for name, constant in self.constants.items():
            if values[name] is not constant and (isinstance(values[name], torch.Tensor) or values[name] != constant):
                return f"argument {name!r} differs from the traced one"
        device = self.refs[0]().device if self.refs else None
        for name, tensor in zip((n for n in self.names if n in self.kinds), inputs, strict=True):
            dtype, rank, width = self.kinds[name]
            if (
                not isinstance(tensor, torch.Tensor)
                or tensor.dtype != dtype
                or tensor.dim() != rank
                or (width is not None and tensor.shape[-1] != width)
            ):
                traced = f"{str(dtype).removeprefix('torch.')} tensor of rank {rank}"
                return f"argument {name!r} differs from the traced {traced}; give optimize example_inputs like it"
            if device is not None and tensor.device != device:
                return f"argument {name!r} is on another device than the weights"
        if torch.is_grad_enabled() and (any(t.requires_grad for t in inputs) or any(r().requires_grad for r in self.all_refs())):
            return "gradients are on and moefx has no backward (use torch.no_grad() or torch.inference_mode())"
        if forward_ad._current_level >= 0 or torch._C._functorch.maybe_current_level() is not None:
            return "a transform of torch.func or forward-mode differentiation is on"
        if self.block.training:
            return "the block is in training mode"
        if torch.is_autocast_enabled(device.type if device is not None else "cpu"):
            return "autocast is on"
        if any(m._modules.get(name) is not child or "forward" in child.__dict__ for m, name, child in self.parts):
            return "a submodule was replaced or its forward patched"
        if any(self.hooks) and foreign_hooks(self.hooks):
            return "a submodule has forward hooks, which its rewritten form would not call"
        return "router logits are collected" if router_logits_wanted() else None

    def all_refs(self) -> list[WeightRef]:
        return self.refs + (self.pack.sources if self.pack is not None else [])

    def _as_it_was(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.sharded:
            raise RuntimeError(f"this call needs the block as it was ({reason}), but this process keeps only its own experts")
        if self.pack is not None:
            self.pack.restore()
        if reason not in self.calls_left_alone and not reason.startswith("router logits"):
            warnings.warn(f"moefx: {type(self.block).__name__} ran as it was: {reason}", stacklevel=3)
        self.calls_left_alone[reason] = self.calls_left_alone.get(reason, 0) + 1
        return type(self.block).forward(self.block, *args, **kwargs)


def foreign_hooks(hooks: Sequence[Mapping[int, Any]]) -> bool:
    """Whether a hook is there that a rewritten block would not call. Those transformers leaves on a router only record, when asked."""
    return any(getattr(h, "__module__", "") != "transformers.utils.output_capturing" for found in hooks for h in found.values())


def restore(model: nn.Module) -> None:
    """Bring back every parameter that `inplace=True` freed, before writing to them; packs then follow the writes."""
    for _, forward in swapped(model):
        if forward.pack is not None:
            forward.pack.restore()


def swapped(model: nn.Module) -> list[tuple[str, BlockForward]]:
    """(name, forward) of every rewritten block."""
    return [(n, f) for n, m in model.named_modules() if isinstance(f := m.__dict__.get("forward"), BlockForward)]


def invalidate(model: nn.Module) -> None:
    """Forget every pack: the next call packs again. Needed only after writes that torch does not count (`.data`, numpy)."""
    for _, forward in swapped(model):
        if forward.pack is not None:
            forward.pack.invalidate()


class _KernelCalls(fx.Tracer):
    """What fx reads a pickled graph with: packing functions stay calls, as they were."""

    def __init__(self) -> None:
        from moefx.kernels.registry import KERNELS

        super().__init__(autowrap_functions=tuple({k.pack for k in KERNELS}))


def stripped(module: fx.GraphModule) -> fx.GraphModule:
    """The same module over a graph without metadata, so that it pickles and deep-copies."""
    new = fx.Graph(tracer_cls=_KernelCalls)
    new.output(new.graph_copy(module.graph, {}))
    attributes = {n.target: getattr(module, str(n.target)) for n in new.nodes if n.op == "get_attr"}
    return fx.GraphModule(attributes, new)


def note_expert_ranges(ranges: Mapping[str, tuple[int, int]]) -> Any:
    """A state_dict hook that writes the global expert range [first, end) of every sharded parameter into `state_dict._metadata`."""

    def hook(module: nn.Module, state: Any, prefix: str, local: Any) -> None:
        del module, local
        state._metadata.setdefault(prefix.removesuffix("."), {})["moefx_expert_ranges"] = {prefix + n: r for n, r in ranges.items()}

    return hook
