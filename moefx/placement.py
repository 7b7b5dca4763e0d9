"""Where the shared expert goes: one more slot (or several) of the routed experts, or a separate MLP."""

from __future__ import annotations

from moefx.layer import Layer
from moefx.options import PER_RANK_SLOT, Options


def slots(layer: Layer) -> int:
    """How many slots of the routed size the shared expert fills; 0 when it does not divide."""
    assert layer.shared is not None
    return layer.shared.D // layer.D if layer.shared.D % layer.D == 0 else 0


def why_unfused(layer: Layer, options: Options) -> str | None:
    """The first predicate of a fused slot that fails, in words; None when the shared expert may be fused (whatever the kernel says)."""
    shared = layer.shared
    assert shared is not None
    if "fuse_shared_expert" in options.disable:
        return "the pass fuse_shared_expert is disabled"
    if layer.shared_why_unfused is not None:
        return layer.shared_why_unfused
    if shared.D % layer.D != 0:
        return f"D_shared % D == 0 fails: {shared.D} % {layer.D}"
    if _meaning(layer, True) != _meaning(layer, False):
        return f"the branches differ: the routed experts compute {_describe(layer, False)}, the shared expert {_describe(layer, True)}"
    if shared.weight_format != layer.weight_format:
        return f"weight formats differ: routed {layer.weight_format}, shared {shared.weight_format}"
    if shared.bias and not layer.bias:
        return "the shared expert has a bias and the routed experts have none"
    if options.a2a in PER_RANK_SLOT and options.ep_size > 1:
        count, ep = slots(layer), options.ep_size
        return (
            f"a2a={options.a2a!r} has one physical shared slot on every rank, {ep} in all, and the model {count} global: "
            f"({layer.E_total} + {count} - {ep}) % {ep} = {(layer.E_total + count - ep) % ep}, not 0"
        )
    return None


def _meaning(layer: Layer, shared: bool) -> tuple[object, ...]:
    a = layer.shared.activation if shared and layer.shared else layer.activation
    return a.kind, a.limit, a.clamp, a.alpha, a.beta


def _describe(layer: Layer, shared: bool) -> str:
    kind, limit, clamp, _, _ = _meaning(layer, shared)
    return f"{kind} with limit {limit:g} ({clamp})" if isinstance(limit, float) else f"{kind} without a limit"
