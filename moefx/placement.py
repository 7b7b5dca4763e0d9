"""Where the shared expert goes: one more slot (or several) of the routed experts, or a separate MLP; by contract, for each backend."""

from __future__ import annotations

from typing import Any

from moefx.contract import Contract, Outcome, Predicate
from moefx.layer import Layer, Shared
from moefx.options import PER_RANK_SLOT, Options

_SLOT = (
    Predicate("D_shared % D == 0", "a slot has the width of a routed expert"),
    Predicate("shared_activation == activation", "a slot runs the routed experts' activation"),
    Predicate("shared_limit == limit", "a slot clamps at the routed experts' limit"),
    Predicate("shared_clamp == clamp", "a slot clamps where the routed experts do"),
    Predicate("shared_weight_format == weight_format", "the slots of one tensor have one storage type"),
    Predicate("shared_bias == False or bias == True", "a slot has a bias only where the routed experts have one"),
    Predicate("E_total % ep_size == 0", "every rank has as many routed experts; slots are not counted in"),
)
GLOBAL_SLOT = Contract("shared_slot", _SLOT)
"""One slot for the whole group: added on one rank, or with weight 1 in a group where tokens are exchanged."""
RANK_SLOT = Contract("shared_slot", (*_SLOT, Predicate("ep_size == 1", "the backend has one physical shared slot on every rank")))


def slots(layer: Layer) -> int:
    """How many slots of the routed size the shared expert fills; 0 when it does not divide."""
    assert layer.shared is not None
    return layer.shared.D // layer.D if layer.shared.D % layer.D == 0 else 0


def shared_slot(layer: Layer, options: Options) -> Outcome:
    """The backend's contract of a fused slot on this layer."""
    assert layer.shared is not None
    contract = RANK_SLOT if options.a2a in PER_RANK_SLOT else GLOBAL_SLOT
    return contract.evaluate(_facts(layer, layer.shared, options))


def why_unfused(layer: Layer, options: Options) -> str | None:
    """Why the shared expert can't become a slot, in words; None when it may be fused (whatever the kernel says)."""
    if "fuse_shared_expert" in options.disable:
        return "the pass fuse_shared_expert is disabled"
    if layer.shared_why_unfused is not None:
        return layer.shared_why_unfused
    failed = shared_slot(layer, options).first_failure()
    if failed is None:
        return None
    values = ", ".join(f"{k} = {v}" for k, v in failed.values.items())
    reason = f"{failed.text} fails with {values}: {failed.why}"
    if failed.text == "ep_size == 1":
        count, ep = slots(layer), options.ep_size
        left = (layer.E_total + count - ep) % ep
        reason += (
            f" with a2a={options.a2a!r}, {ep} in all, and the model has {count} global: ({layer.E_total} + {count} - {ep}) % {ep} = {left}"
        )
    return reason


def _facts(layer: Layer, shared: Shared, options: Options) -> dict[str, Any]:
    own, routed = shared.activation, layer.activation
    return {
        "D": layer.D,
        "D_shared": shared.D,
        "E_total": layer.E_total,
        "ep_size": options.ep_size,
        "activation": routed.formula(),
        "shared_activation": own.formula(),
        "clamp": routed.clamp,
        "shared_clamp": own.clamp,
        "limit": routed.limit,
        "shared_limit": own.limit,
        "bias": layer.bias,
        "shared_bias": shared.bias,
        "weight_format": layer.weight_format,
        "shared_weight_format": shared.weight_format,
    }
