"""Bad input: a clear exception that names the value and the remedy, before anything changes."""

from __future__ import annotations

from typing import Any

import moe_blocks as blocks
import pytest
import torch
from torch import nn

import moefx
from moefx.swap import swapped

VALUES: list[tuple[dict[str, Any], str]] = [
    ({"ep_size": 3}, r"4 routed experts .* ep_size=3 .* 1, 2, 4"),
    ({"ep_size": 8}, "ep_size=8 is more than the 4"),
    ({"ep_size": 0}, "ep_size=0"),
    ({"ep_size": True}, "ep_size=True"),
    ({"ep_size": 2.0}, "ep_size=2.0"),
    ({"a2a": "smoke"}, "a2a='smoke'.*deepep"),
    ({"target": "sm42"}, "target='sm42'.*sm90"),
    ({"precision": "fp3"}, "precision='fp3'.*preserve"),
    ({"disable": ("raise_eyebrows",)}, "disable='raise_eyebrows'.*raise_experts"),
    ({"group": object()}, "not initialised"),
    ({"strict": "no"}, "strict='no' must be True or False"),
    ({"example_inputs": torch.randn(2, 7, 5)}, "does not run on example_inputs"),
]


@pytest.mark.parametrize(("options", "text"), VALUES, ids=[next(iter(o)) + str(i) for i, (o, _) in enumerate(VALUES)])
def test_values(options: dict[str, Any], text: str) -> None:
    block = blocks.Gathered().eval()
    with pytest.raises(ValueError, match=text):
        moefx.optimize(block, inplace=True, **options)
    assert not swapped(block)


@pytest.mark.parametrize("thing", [None, 3, "qwen3.5-35b-a3b", blocks.Gathered])
def test_no_module(thing: Any) -> None:
    with pytest.raises(TypeError, match="torch.nn.Module"):
        moefx.optimize(thing)
    with pytest.raises(TypeError, match="torch.nn.Module"):
        moefx.report(thing)


def test_training_meta_and_twice() -> None:
    with pytest.raises(ValueError, match=r"training mode.*eval\(\)"):
        moefx.optimize(blocks.Gathered())
    with torch.device("meta"):
        meta = blocks.Gathered().eval()
    with pytest.raises(ValueError, match="meta device.*moefx.plan"):
        moefx.optimize(meta)
    result = moefx.optimize(blocks.Gathered().eval())
    with pytest.raises(ValueError, match="already optimised"):
        moefx.optimize(result)
    with pytest.raises(ValueError, match="already optimised"):
        moefx.optimize(nn.Sequential(result).eval())
    with pytest.raises(ValueError, match="not optimised"):
        moefx.report(blocks.Gathered())


def test_strict_wants_the_precision_that_was_asked_for() -> None:
    with pytest.raises(moefx.errors.NotRewrittenError, match="own precision"):
        moefx.optimize(blocks.Gathered().eval(), precision="fp8_weight_only", strict=True)
