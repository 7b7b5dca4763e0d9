"""Failures that show only after the arguments were found valid. Bad values raise ValueError, things that are no module TypeError."""

from __future__ import annotations


class MoefxError(RuntimeError):
    """Base of everything moefx raises for what fails later."""


class NotRewrittenError(MoefxError):
    """`strict=True` and a layer that looks like MoE was left alone."""


class ValueCheckError(MoefxError):
    """A condition on values that a kernel's contract names does not hold (checked with MOEFX_CHECK_VALUES=1)."""


class ParameterFreedError(MoefxError):
    """A parameter that `inplace=True` freed was written in place: the write is lost."""


class WeightGoneError(LookupError):
    """A weight that a rewritten block reads is no parameter or buffer of its module any more."""
