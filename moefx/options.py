"""The options of `optimize`, `plan` and the torch.compile backend, validated in one place."""

from __future__ import annotations

from dataclasses import dataclass

A2A = ("auto", "none", "all_to_all", "deepep", "mori")
PRECISIONS = ("preserve", "fp8", "fp8_weight_only", "int8")
TARGETS = ("cpu", "sm90", "sm100", "gfx942", "gfx950")
PASSES = ("normalize", "raise_experts", "raise_shared_expert", "fuse_shared_expert", "pad_experts")
"""Passes that may be left out by `disable`; the others carry out what was decided."""
PER_RANK_SLOT = frozenset({"deepep", "mori"})  # one physical shared-expert slot on every rank (facts of both backends)


@dataclass(frozen=True)
class Options:
    """What the user asked for, resolved: `a2a` is "local", "none", "all_to_all", "deepep" or "mori"; `target` is one of TARGETS.

    `grouped` is true when a process group carries the ranks; else they are virtual, in this process. `tokens`: how many a call has,
    when that is known.
    """

    ep_size: int = 1
    a2a: str = "local"
    precision: str = "preserve"
    target: str = "cpu"
    disable: tuple[str, ...] = ()
    grouped: bool = False
    tokens: int | None = None


def check_choice(what: str, value: object, allowed: tuple[str, ...]) -> None:
    """ValueError that names the value and what would have been right."""
    if value not in allowed:
        raise ValueError(f"{what}={value!r} is unknown; choose one of {', '.join(map(repr, allowed))}")


def check_disable(disable: object) -> tuple[str, ...]:
    """The names as a tuple. ValueError for one that is no pass and no kernel, TypeError for what is no name or sequence of names."""
    from moefx.kernels.registry import KERNELS

    if not isinstance(disable, (str, list, tuple, set, frozenset)):
        raise TypeError(f"disable={disable!r} must be a name of a pass or kernel, or a tuple of such names")
    names = (disable,) if isinstance(disable, str) else tuple(disable)
    for name in names:
        check_choice("disable", name, (*PASSES, *(k.name for k in KERNELS)))
    return names


def check_ep_size(ep_size: object) -> None:
    if not isinstance(ep_size, int) or isinstance(ep_size, bool) or ep_size < 1:
        raise ValueError(f"ep_size={ep_size!r} must be an integer of at least 1: the number of expert-parallel ranks")


def resolve_a2a(a2a: str, ep_size: int, grouped: bool) -> str:
    """ "auto" is "none" with a process group and "local" without; one rank is always "local"."""
    if ep_size == 1:
        return "local"
    if a2a == "auto":
        return "none" if grouped else "local"
    return a2a
