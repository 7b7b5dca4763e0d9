"""Read a pointwise region backwards: which expression of which columns of the GEMM outputs is column d of its result?

`pull(output)` starts with the column numbers 0..D-1 and walks to the leaves. A view op is never interpreted: it runs for real on a grid
of positions (token dims set to 1), and the result says which position each column comes from. So the column map (concatenated,
interleaved, ...) is read off the positions at the leaves.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from moefx.activation.field import Algebra, Expr
from moefx.graph import VIEWS, aten, line_of, value

_VIEWS = VIEWS | {
    aten.select.int,
    aten.slice.Tensor,
    aten.flip.default,
    aten.narrow.default,
    aten.unfold.default,
    aten.diagonal.default,
    aten.roll.default,
}
_LISTS = frozenset(
    {
        aten.split.Tensor,
        aten.split.sizes,
        aten.split_with_sizes.default,
        aten.chunk.default,
        aten.unbind.int,
        aten.tensor_split.sections,
        aten.tensor_split.indices,
    }
)
_SHAPED = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default})
_CASTS = frozenset({aten._to_copy.default, aten.to.dtype, aten.to.dtype_layout, aten.to.other, aten.type_as.default})
_COMPARE = {"gt": (True, False), "ge": (True, False), "lt": (False, False), "le": (False, False)}


class UnreadableError(Exception):
    """A node the region can't be read through; `node` is it."""

    def __init__(self, text: str, node: fx.Node):
        where = line_of(node)
        super().__init__(f"{text}: {node.name}{f' ({where})' if where else ''}")
        self.node = node


class Pull:
    """One reading of a region; `leaves` maps leaf nodes to the dim of their features."""

    def __init__(self, algebra: Algebra, leaves: dict[fx.Node, int]):
        self.algebra = algebra
        self.leaves = leaves
        self._memo: dict[tuple[fx.Node, bytes], Expr] = {}

    def read(self, node: Any, positions: torch.Tensor) -> Expr:
        """The expression at flat `positions` [D] of the node's grid."""
        if isinstance(node, (int, float)) and not isinstance(node, bool):
            return self.algebra.constant(node)
        if not isinstance(node, fx.Node):
            raise ValueError(f"{node!r} is no number and no tensor")
        key = (node, positions.numpy().tobytes())
        if key not in self._memo:
            self._memo[key] = self._read(node, positions)
        return self._memo[key]

    def _read(self, node: fx.Node, positions: torch.Tensor) -> Expr:
        if node in self.leaves:
            return self._leaf(node, positions)
        if node.op == "get_attr":
            return self._constant_tensor(node, getattr(node.graph.owning_module, str(node.target)))
        if node.op != "call_function":
            raise UnreadableError("the activation depends on an input of the block", node)
        val = value(node)
        if isinstance(val, torch.Tensor) and not val.is_floating_point() and val.dtype is not torch.bool:
            raise UnreadableError(f"a value of dtype {val.dtype} inside the activation", node)
        if isinstance(val, torch.Tensor) and val.dtype.itemsize == 1 and val.dtype is not torch.bool:
            raise UnreadableError(f"a cast to {val.dtype} inside the activation", node)
        target = node.target
        if target in _VIEWS:
            return self.read(node.args[0], self._through(node, positions))
        if target is operator.getitem and node.args[0].target in _LISTS:
            return self.read(node.args[0].args[0], self._through(node, positions))
        if target in (aten.cat.default, aten.stack.default):
            return self._joined(node, positions)
        if target in _CASTS:
            return self.read(node.args[0], positions)
        name = str(getattr(target, "_schema", target)).split("(")[0].removeprefix("aten::").split(".")[0]
        rule = _RULES.get(name)
        if rule is None:
            raise UnreadableError(f"aten.{name} is no element-wise op moefx knows", node)
        return rule(self, node, positions)

    def _leaf(self, node: fx.Node, positions: torch.Tensor) -> Expr:
        sizes, dim = concrete_shape(node), self.leaves[node] % len(concrete_shape(node))
        inner = 1
        for size in sizes[dim + 1 :]:
            inner *= size
        columns = torch.div(positions, inner, rounding_mode="floor")
        if bool((positions % inner != 0).any()) or bool((columns >= sizes[dim]).any()):
            raise UnreadableError("the activation mixes the rows of different tokens", node)
        return self.algebra.atom("leaf", (node, tuple(columns.tolist())))

    def _constant_tensor(self, node: fx.Node, tensor: Any) -> Expr:
        flat = tensor.detach().reshape(-1) if isinstance(tensor, torch.Tensor) else torch.tensor([])
        if flat.numel() == 0 or not bool((flat == flat[0]).all()):
            raise UnreadableError("a constant that differs from column to column", node)
        return self.algebra.constant(float(flat[0]))

    def _through(self, node: fx.Node, positions: torch.Tensor) -> torch.Tensor:
        source = node.args[0].args[0] if node.target is operator.getitem else node.args[0]
        sizes = concrete_shape(source)
        total = 1
        for size in sizes:
            total *= size
        grid = torch.arange(total).view(sizes)
        try:
            if node.target in _SHAPED:
                moved = grid.expand(concrete_shape(node)) if node.target is aten.expand.default else grid.reshape(concrete_shape(node))
            elif node.target is operator.getitem:
                inner = node.args[0]
                args = [concrete(a) for a in inner.args[1:]]
                moved = inner.target(grid, *args, **inner.kwargs)[node.args[1]]
            else:
                moved = node.target(grid, *[concrete(a) for a in node.args[1:]], **_no_format(node.kwargs))
        except (RuntimeError, IndexError, TypeError) as error:
            raise UnreadableError(f"a view that depends on the tokens ({str(error).splitlines()[0]})", node) from error
        flat = moved.reshape(-1)
        if int(positions.max()) >= flat.numel():
            raise UnreadableError("a view that depends on the tokens", node)
        return flat[positions]

    def _joined(self, node: fx.Node, positions: torch.Tensor) -> Expr:
        parts = list(node.args[0])
        dim = int(node.args[1]) if len(node.args) > 1 else int(node.kwargs.get("dim", 0))
        join = torch.cat if node.target is aten.cat.default else torch.stack
        numbers, grids = [], []
        for i, part in enumerate(parts):
            sizes = concrete_shape(part)
            total = torch.Size(sizes).numel()
            grids.append(torch.arange(total).view(sizes))
            numbers.append(torch.full(sizes, i))
        which, where = join(numbers, dim).reshape(-1)[positions], join(grids, dim).reshape(-1)[positions]
        if bool((which != which[0]).any()):
            return self._interleaved(node, parts, which, where)
        return self.read(parts[int(which[0])], where)

    def _interleaved(self, node: fx.Node, parts: list[fx.Node], which: torch.Tensor, where: torch.Tensor) -> Expr:
        """Columns from several parts: one expression only when all parts are views of one leaf."""
        sources, positions = [], torch.empty_like(where)
        for i in which.unique().tolist():
            chosen = which == i
            expr = self.read(parts[i], where[chosen])
            atoms = self.algebra.atoms_of(expr)
            atom = next(iter(atoms)) if len(atoms) == 1 else None
            if atom is None or atom.kind != "leaf" or expr != self.algebra.atom("leaf", atom.key):
                raise UnreadableError("columns of different expressions are joined", node)
            sources.append(atom.key[0])
            positions[chosen] = torch.tensor(atom.key[1])
        if len(set(sources)) != 1:
            raise UnreadableError("columns of different products are joined", node)
        return self.algebra.atom("leaf", (sources[0], tuple(positions.tolist())))

    def operand(self, node: fx.Node, position: int | str, positions: torch.Tensor) -> Expr:
        """An operand of an element-wise op, broadcast to the op's shape."""
        source = node.kwargs.get(position) if isinstance(position, str) else node.args[position]
        if not isinstance(source, fx.Node):
            return self.read(source, positions)
        sizes = concrete_shape(source)
        grid = torch.arange(torch.Size(sizes).numel()).view(sizes)
        return self.read(source, grid.expand(concrete_shape(node)).reshape(-1)[positions])

    def condition(self, node: Any, positions: torch.Tensor) -> tuple[bool, Expr, Expr]:
        name = (
            str(getattr(node.target, "_schema", "")).split("(")[0].removeprefix("aten::").split(".")[0] if isinstance(node, fx.Node) else ""
        )
        if name not in _COMPARE:
            raise UnreadableError("a condition that is no comparison of gate or up with a number", node)
        return _COMPARE[name][0], self.operand(node, 0, positions), self.operand(node, 1, positions)


def concrete(item: Any) -> Any:
    """An argument with every symbolic size read as if there were one token."""
    if isinstance(item, fx.Node):
        return concrete(value(item))
    if isinstance(item, (list, tuple)):
        return type(item)(concrete(i) for i in item)
    if isinstance(item, torch.SymInt):
        expr = item.node.expr
        return int(expr.subs({s: 1 for s in expr.free_symbols}))
    return item


def concrete_shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(concrete(s) for s in value(node).shape)


def _no_format(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in kwargs.items() if k != "memory_format"}


Rule = Callable[[Pull, fx.Node, torch.Tensor], Expr]


def _alpha(node: fx.Node) -> float:
    alpha = node.kwargs.get("alpha", 1)
    return alpha if isinstance(alpha, (int, float)) else 1


def _add(p: Pull, n: fx.Node, i: torch.Tensor) -> Expr:
    return p.operand(n, 0, i) + p.algebra.constant(_alpha(n)) * p.operand(n, 1, i)


def _sub(p: Pull, n: fx.Node, i: torch.Tensor) -> Expr:
    return p.operand(n, 0, i) - p.algebra.constant(_alpha(n)) * p.operand(n, 1, i)


def _rsub(p: Pull, n: fx.Node, i: torch.Tensor) -> Expr:
    return p.operand(n, 1, i) - p.algebra.constant(_alpha(n)) * p.operand(n, 0, i)


def _div(p: Pull, n: fx.Node, i: torch.Tensor) -> Expr:
    if n.kwargs.get("rounding_mode") is not None:
        raise UnreadableError("a rounding division", n)
    return p.algebra.divide(p.operand(n, 0, i), p.operand(n, 1, i))


def _pow(p: Pull, n: fx.Node, i: torch.Tensor) -> Expr:
    exponent = n.args[1]
    base = p.operand(n, 0, i)
    if isinstance(exponent, (int, float)) and float(exponent).is_integer() and 1 <= exponent <= 8:
        return base ** int(exponent)
    if exponent == -1:
        return p.algebra.divide(p.algebra.constant(1), base)
    return p.algebra.function("pow", base, str(exponent))


def _clamp(p: Pull, n: fx.Node, i: torch.Tensor) -> Expr:
    x = p.operand(n, 0, i)
    low = n.args[1] if len(n.args) > 1 else n.kwargs.get("min")
    high = n.args[2] if len(n.args) > 2 else n.kwargs.get("max")
    if low is not None:
        x = p.algebra.maximum(x, _bound(p, n, low, i))
    return x if high is None else p.algebra.minimum(x, _bound(p, n, high, i))


def _bound(p: Pull, n: fx.Node, bound: Any, i: torch.Tensor) -> Expr:
    if not isinstance(bound, fx.Node):
        return p.algebra.constant(bound)
    sizes = concrete_shape(bound)
    grid = torch.arange(torch.Size(sizes).numel()).view(sizes)
    return p.read(bound, grid.expand(concrete_shape(n)).reshape(-1)[i])


def _where(p: Pull, n: fx.Node, i: torch.Tensor) -> Expr:
    greater, left, right = p.condition(n.args[0], i)
    found = p.algebra.where(greater, left, right, p.operand(n, 1, i), p.operand(n, 2, i))
    if found is None:
        raise UnreadableError("a where that is no clamp (or that drops NaN)", n)
    return found


def _full(p: Pull, n: fx.Node, i: torch.Tensor) -> Expr:
    fill = n.args[0] if "scalar_tensor" in str(n.target) else n.args[1]
    return p.read(fill, i)


def _fixed(number: float) -> Rule:
    return lambda p, n, i: p.algebra.constant(number)


def _unary(change: Callable[[Algebra, Expr], Expr]) -> Rule:
    return lambda p, n, i: change(p.algebra, p.operand(n, 0, i))


def _unknown(name: str) -> Rule:
    return _unary(lambda a, x: a.function(name, x))


_RULES: dict[str, Rule] = {
    "add": _add,
    "sub": _sub,
    "rsub": _rsub,
    "mul": lambda p, n, i: p.operand(n, 0, i) * p.operand(n, 1, i),
    "div": _div,
    "neg": _unary(lambda a, x: -x),
    "reciprocal": _unary(lambda a, x: a.divide(a.constant(1), x)),
    "square": _unary(lambda a, x: x**2),
    "pow": _pow,
    "abs": _unary(lambda a, x: a.absolute(x)),
    "relu": _unary(lambda a, x: a.maximum(x, a.constant(0))),
    "sigmoid": _unary(lambda a, x: a.sigmoid(x)),
    "tanh": _unary(lambda a, x: a.tanh(x)),
    "exp": _unary(lambda a, x: a.exp(x)),
    "erf": _unary(lambda a, x: a.erf(x)),
    "silu": _unary(lambda a, x: x * a.sigmoid(x)),
    "gelu": lambda p, n, i: p.algebra.gelu(p.operand(n, 0, i), str(n.kwargs.get("approximate", "none"))),
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": lambda p, n, i: p.algebra.minimum(p.operand(n, 0, i), _bound(p, n, n.args[1], i)),
    "hardtanh": lambda p, n, i: p.algebra.minimum(
        p.algebra.maximum(p.operand(n, 0, i), p.algebra.constant(n.args[1] if len(n.args) > 1 else -1.0)),
        p.algebra.constant(n.args[2] if len(n.args) > 2 else 1.0),
    ),
    "minimum": lambda p, n, i: p.algebra.minimum(p.operand(n, 0, i), p.operand(n, 1, i)),
    "maximum": lambda p, n, i: p.algebra.maximum(p.operand(n, 0, i), p.operand(n, 1, i)),
    "where": _where,
    "full": _full,
    "full_like": _full,
    "scalar_tensor": _full,
    "zeros_like": _fixed(0.0),
    "ones_like": _fixed(1.0),
    "zeros": _fixed(0.0),
    "ones": _fixed(1.0),
    **{
        name: _unknown(name)
        for name in ("softplus", "log", "log1p", "expm1", "sqrt", "rsqrt", "sin", "cos", "mish", "elu", "hardswish", "log_sigmoid")
    },
}


def region_nodes(output: fx.Node, leaves: Sequence[fx.Node]) -> list[fx.Node]:
    """Nodes of the region in graph order, leaves excluded."""
    seen: set[fx.Node] = set()
    todo = [output]
    while todo:
        node = todo.pop()
        if node not in seen and node not in leaves:
            seen.add(node)
            todo.extend(node.all_input_nodes)
    return [n for n in output.graph.nodes if n in seen]
