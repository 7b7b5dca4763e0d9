"""The vocabulary between the graph side and the plan: one MoE layer as sizes, types and an activation. No tensors, no graph."""

from __future__ import annotations

from dataclasses import dataclass

from moefx.activation.spec import Activation

FORMS = ("loop", "module_list", "gathered_bmm", "grouped_mm", "dense", "opaque")


@dataclass(frozen=True)
class Shared:
    """A shared expert: an MLP every token passes.

    `D` is its intermediate size (a multiple of the routed one when several were folded into one MLP), `gate` is None or "sigmoid",
    `weight_format` the storage of its weights ("bfloat16", "float8_e4m3fn", ...: excluded from quantisation or not).
    """

    D: int
    gate: str | None
    activation: Activation
    weight_format: str
    bias: bool = False


@dataclass(frozen=True)
class Layer:
    """One MoE layer, from a traced graph or from a config.

    E_total routed experts of intermediate size D over hidden size H, K of them per token. `weight_format` is the storage dtype of the
    expert weights, `dtype` the activations' dtype, `count` how many layers of the model are like this one (1 for a traced layer).
    `shared_why_unfused` is a reason known on the graph side for which the shared expert can't become a slot.
    """

    name: str
    form: str
    E_total: int
    D: int
    H: int
    K: int
    activation: Activation
    dtype: str
    weight_format: str
    bias: bool = False
    shared: Shared | None = None
    shared_why_unfused: str | None = None
    count: int = 1
