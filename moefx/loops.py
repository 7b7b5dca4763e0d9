"""Trace blocks whose experts run in a data-dependent Python loop, by making the loop total.

"Which experts were hit" becomes all of them: the graph then holds every expert's body once and finds its rows at run time. Sizes that
depend on data get hints of at least 2 for the time of the trace, so that "no token" branches are not taken. What was assumed on the way
is audited: an equality of sizes, or a size read as a number, means that the trace is not total (chunks, capacities), and is refused.
The caller compares the result with the block itself (`moefx.verify`).
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode

from moefx import ops
from moefx._compat import ShapeEnv, quiet_export_logs, without_fake_mode

LEAD_2D = (317, 331)  # rows of the example: more than any hint, prime, so that no size is equal to another by chance
LEAD_1D = (104927,)


class UntraceableError(Exception):
    """A loop that can't be made total; the text says which assumption failed."""


class Host(torch.Tensor):
    """Expert numbers known while tracing. Ops on host values alone run for real; among fake tensors they count as ints."""


class PortableGroupedMm(TorchFunctionMode):
    """`F.grouped_mm` outside bf16 becomes `moefx::grouped_mm`: export refuses the former on a CPU."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.grouped_mm, torch._grouped_mm) and args[0].dtype != torch.bfloat16 and kwargs.get("bias") is None:
            offs = kwargs.get("offs", args[2] if len(args) > 2 else None)
            if args[0].dim() == 2 and args[1].dim() == 3 and offs is not None:
                return ops.grouped_mm(args[0], args[1], offs)
        return func(*args, **kwargs)


def _assume_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    if x.shape[0] != rows:
        raise RuntimeError(f"the experts of a sorted loop hold {x.shape[0]} rows, expected {rows}")
    return x.clone()


assume_rows = ops.define("assume_rows(Tensor x, SymInt rows) -> Tensor", _assume_rows, lambda x, rows: x.new_empty(rows, *x.shape[1:]))
"""x [rows, ..], whose number of rows the trace could not know, as itself."""


def export_total(
    block: nn.Module, values: dict[str, Any], *, num_experts: int, dynamic_shapes: dict[str, Any], table: dict[Any, Any]
) -> ExportedProgram:
    """The block on `values` (its forward parameters in order) as one functional graph, total over `num_experts`, decomposed by `table`.

    UntraceableError when the trace fails or its assumptions do not hold for every input.
    """
    audit = _Audit()
    big = {n: _with_many_rows(v, dynamic_shapes.get(n)) for n, v in values.items()}
    try:
        with torch.no_grad(), _hinted_sizes(audit), quiet_export_logs():
            with PortableGroupedMm(), _AllExperts(num_experts):
                program = torch.export.export(
                    block,
                    *call_arguments(block, big),
                    dynamic_shapes=call_shapes(block, dynamic_shapes),
                    strict=False,
                    prefer_deferred_runtime_asserts_over_guards=True,
                )
            program = program.run_decompositions(table)
    except UntraceableError:
        raise
    except Exception as error:  # noqa: BLE001  export raises nearly every type there is; all mean "not traceable"
        text = str(error).strip().splitlines()
        raise UntraceableError(f"{type(error).__name__}: {text[0] if text else ''}") from error
    audit.check()
    return program


def call_arguments(block: nn.Module, values: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of a call: by position wherever the forward allows (a decorated forward may know other names)."""
    named = _keyword_only(block)
    return tuple(v for n, v in values.items() if n not in named), {n: v for n, v in values.items() if n in named}


def call_shapes(block: nn.Module, shapes: dict[str, Any]) -> Any:
    """The dynamic shapes of `call_arguments`, as torch.export wants them."""
    return shapes if _keyword_only(block) & set(shapes) else tuple(shapes.values())


def _keyword_only(block: nn.Module) -> set[str]:
    parameters = inspect.signature(type(block).forward).parameters.values()
    return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}


def _with_many_rows(value: Any, dims: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not dims:
        return value
    lead = LEAD_2D if len(dims) == 2 else LEAD_1D
    return torch.empty(*lead, *value.shape[len(dims) :], dtype=value.dtype, device=value.device)


class _Audit:
    """Every fact about data-dependent sizes that the trace took from their hints."""

    def __init__(self) -> None:
        self.assumed: list[tuple[Any, Any]] = []

    def check(self) -> None:
        for expr, result in self.assumed:
            if isinstance(expr, sympy.Symbol):
                raise UntraceableError(f"the loop reads the data-dependent size {expr} as a number (capacity, chunk or count)")
            if isinstance(expr, sympy.Eq) and result == sympy.true:
                raise UntraceableError(f"the loop needs {expr.lhs} == {expr.rhs}, which does not hold for every input")
            if isinstance(expr, sympy.Ne) and result == sympy.false:
                raise UntraceableError(f"the loop needs {expr.lhs} == {expr.rhs}, which does not hold for every input")
            if isinstance(expr, (sympy.Integer, int)):
                raise UntraceableError("the loop depends on the value of a count")


@contextlib.contextmanager
def _hinted_sizes(audit: _Audit) -> Iterator[None]:
    create, log = ShapeEnv.create_unbacked_symint, ShapeEnv._log_real_tensor_propagation
    hints = itertools.count(11, 13)

    def hinted(self: Any, *args: Any, **kwargs: Any) -> Any:
        symbol = create(self, *args, **kwargs)
        self.set_real_tensor_prop_unbacked_vals(symbol.node.expr, next(hints))
        return symbol

    ShapeEnv.create_unbacked_symint = hinted
    ShapeEnv._log_real_tensor_propagation = lambda self, expr, result: audit.assumed.append((expr, result))
    try:
        yield
    finally:
        ShapeEnv.create_unbacked_symint, ShapeEnv._log_real_tensor_propagation = create, log


_NONZERO = {torch.nonzero, torch.Tensor.nonzero, torch.argwhere, torch.Tensor.argwhere}
_UNIQUE = {torch.unique, torch.Tensor.unique, torch.unique_consecutive, torch.Tensor.unique_consecutive}
_BINCOUNT = {torch.bincount, torch.Tensor.bincount}
_TRUE = {"any", "gt", "ne", "__gt__", "__ne__", "greater", "ge", "__ge__"}
_FALSE = {"eq", "__eq__"}


class _AllExperts(TorchFunctionMode):
    def __init__(self, experts: int):
        super().__init__()
        self.experts = experts
        self.truth: dict[int, tuple[torch.Tensor, bool]] = {}
        self.rows: Any = None

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in _flat((args, kwargs)) if isinstance(t, torch.Tensor)]
        if any(isinstance(t, Host) for t in tensors):
            if all(isinstance(t, Host) for t in tensors):
                return _for_real(func, args, kwargs)
            args, kwargs = _as_numbers(args), _as_numbers(kwargs)
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        name = getattr(func, "__name__", "")
        if first is not None:
            special = self._special(func, name, first, args, kwargs)
            if special is not NotImplemented:
                return special
        result = func(*args, **kwargs)
        if func in (torch.cat, torch.concat) and self._joins_experts(args, kwargs):
            return assume_rows(result, self.rows)
        self._note(name, first, args, result)
        return result

    def _joins_experts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """The outputs of a loop over sorted tokens, one part an expert: together they have as many rows as were sorted."""
        parts = args[0] if args else kwargs["tensors"]
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        return (
            self.rows is not None and dim == 0 and len(parts) == self.experts and all(isinstance(p.shape[0], torch.SymInt) for p in parts)
        )

    def _special(self, func: Any, name: str, first: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        per_expert = first.dim() == 1 and isinstance(first.shape[0], int) and first.shape[0] in (self.experts, self.experts + 1)
        if func in _NONZERO and per_expert:
            numbers = _host(self.experts)
            return (numbers,) if kwargs.get("as_tuple") else _for_real(torch.Tensor.unsqueeze, (numbers, 1), {})
        if func in (torch.where, torch.Tensor.where) and len(args) == 1 and not kwargs and per_expert:
            return (_host(self.experts),)
        if func in _UNIQUE and not first.is_floating_point():
            if kwargs.get("return_counts") or kwargs.get("return_inverse"):
                raise UntraceableError("the loop takes counts or positions from torch.unique")
            return _host(self.experts)
        if func in _BINCOUNT:
            length = kwargs.get("minlength", args[2] if len(args) > 2 else self.experts)
            return torch.zeros(length, dtype=torch.int64, device=first.device).scatter_add(0, first, torch.ones_like(first))
        if name == "numpy" and not first.is_floating_point():
            import numpy

            return numpy.array([first[i].item() for i in range(first.shape[0])], dtype=object)
        if name == "tolist" and first.dim() == 1 and isinstance(first.shape[0], int):
            return [first[i].item() for i in range(first.shape[0])]
        if name == "__bool__" and id(first) in self.truth:
            return self.truth[id(first)][1]
        if name in ("argsort", "sort") and first.dim() == 1 and not first.is_floating_point():
            self.rows = first.shape[0]
        return NotImplemented

    def _note(self, name: str, first: torch.Tensor | None, args: tuple[Any, ...], result: Any) -> None:
        """Remember what a later `if` asks: whether a mask has any token (it has), whether a count is zero (it is not)."""
        if isinstance(result, torch.Tensor) and result.dim() == 0 and first is not None:
            zero = len(args) < 2 or (isinstance(args[1], (int, float)) and args[1] == 0)
            if name in _TRUE and zero:
                self.truth[id(result)] = (result, True)
            elif name in _FALSE and zero:
                self.truth[id(result)] = (result, False)
            elif name == "logical_not" and id(first) in self.truth:
                self.truth[id(result)] = (result, not self.truth[id(first)][1])


def _host(experts: int) -> Host:
    with without_fake_mode(), torch._C.DisableTorchFunction():
        return torch.arange(experts).as_subclass(Host)


def _for_real(func: Any, args: Any, kwargs: Any) -> Any:
    with without_fake_mode(), torch._C.DisableTorchFunction():
        result = func(*args, **kwargs)
        return _wrap(list(result) if hasattr(result, "__next__") else result)


def _wrap(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result.as_subclass(Host)
    if isinstance(result, list):
        return iter([_wrap(r) for r in result]) if result and isinstance(result[0], torch.Tensor) else result
    if isinstance(result, tuple):
        return tuple(_wrap(r) for r in result)
    return result


def _as_numbers(item: Any) -> Any:
    if isinstance(item, Host):
        with without_fake_mode(), torch._C.DisableTorchFunction():
            return item.item() if item.numel() == 1 and item.dim() == 0 else item.tolist()
    if isinstance(item, (tuple, list)):
        return type(item)(_as_numbers(i) for i in item)
    if isinstance(item, dict):
        return {k: _as_numbers(v) for k, v in item.items()}
    return item


def _flat(item: Any) -> Iterator[Any]:
    if isinstance(item, dict):
        item = list(item.values())
    if isinstance(item, (tuple, list)):
        for part in item:
            yield from _flat(part)
    else:
        yield item
