"""Expert parallelism in real processes: torchrun over gloo on this machine."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moefx import parallel
from moefx.passes.shard_experts import expert_ranges


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without distributed")
def test_two_processes() -> None:
    """All-reduce and all-to-all against the model as it was: fp32 and bf16, unequal and zero token counts, own experts only."""
    script = Path(__file__).with_name("two_process_main.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()), str(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    assert "OK rank 0" in result.stdout and "OK rank 1" in result.stdout


def test_last_rank_owns_the_slots() -> None:
    assert expert_ranges(8, 4, 9) == [(0, 2), (2, 4), (4, 6), (6, 9)]
    assert expert_ranges(8, 1, 8) == [(0, 8)]


def test_no_group() -> None:
    assert parallel.ranks(None, 4) is None
    with pytest.raises(ValueError, match="init_process_group"):
        parallel.ranks(object(), 2)
