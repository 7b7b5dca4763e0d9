"""Run under torchrun: `optimize` over a process group against the model as it was. Prints OK on every rank or raises."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import moefx

H, D, E, K = 32, 16, 8, 2


class Block(nn.Module):
    """Stacked experts, sigmoid-gated shared expert."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(H, E, bias=False)
        self.w13 = nn.Parameter(torch.randn(E, 2 * D, H) * H**-0.5)
        self.w2 = nn.Parameter(torch.randn(E, H, D) * D**-0.5)
        self.up, self.gate, self.down = nn.Linear(H, D, bias=False), nn.Linear(H, D, bias=False), nn.Linear(D, H, bias=False)
        self.shared_gate = nn.Linear(H, 1, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        x = hidden.reshape(-1, H)
        values, ids = torch.topk(F.softmax(self.router(x), -1, dtype=torch.float32), K)
        weights = (values / values.sum(-1, keepdim=True)).to(x.dtype)
        flat = ids.reshape(-1)
        g, u = torch.bmm(self.w13[flat], x.repeat_interleave(K, 0).unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        y = torch.bmm(self.w2[flat], (F.silu(g) * u).unsqueeze(-1)).squeeze(-1)
        routed = (y * weights.reshape(-1, 1)).view(-1, K, H).sum(1)
        shared = self.down(F.silu(self.gate(x)) * self.up(x))
        return (routed + torch.sigmoid(self.shared_gate(x)) * shared).reshape(hidden.shape)


def same_tokens(a2a: str, dtype: torch.dtype) -> None:
    """a2a "none": every rank passes the same tokens."""
    torch.manual_seed(0)
    block = Block().to(dtype).eval()
    result = moefx.optimize(block, ep_size=dist.get_world_size(), a2a=a2a)
    layer = moefx.report(result).layers[0]
    assert layer["rewritten"], layer
    for tokens in (1, 5, 64):
        x = torch.randn(1, tokens, H, generator=torch.Generator().manual_seed(tokens)).to(dtype)
        compare(result, block, x)
    keeps_own(result, block)


def own_tokens(a2a: str, dtype: torch.dtype) -> None:
    """All-to-all: each rank passes its own tokens, one rank none."""
    torch.manual_seed(0)
    block = Block().to(dtype).eval()
    result = moefx.optimize(block, ep_size=dist.get_world_size(), a2a=a2a)
    layer = moefx.report(result).layers[0]
    assert layer["rewritten"], layer
    expected = "unfused" if a2a in ("deepep", "mori") else "fused"
    assert layer["shared_expert"]["placement"] == expected, layer["shared_expert"]
    rank = dist.get_rank()
    for tokens in ((3, 9, 2), (0, 5, 1), (4, 0, 0), (0, 0, 0)):
        x = torch.randn(1, tokens[rank], H, generator=torch.Generator().manual_seed(rank)).to(dtype)
        compare(result, block, x)
    keeps_own(result, block)


def compare(result: nn.Module, block: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        got, want = result(x), block(x)
    assert got.shape == want.shape, (got.shape, want.shape)
    # Both round to bf16, the block in between too: a unit in the last place of the largest value is no difference.
    largest = want.abs().max().item() if want.numel() else 0.0
    tolerance = 2e-5 if x.dtype == torch.float32 else max(3e-2, 2**-7 * largest)
    error = (got - want).abs().max().item() if want.numel() else 0.0
    assert error <= tolerance, error


def keeps_own(result: nn.Module, block: nn.Module) -> None:
    """A process holds its own experts only; the caller's model keeps all."""
    size, rank = dist.get_world_size(), dist.get_rank()
    state = result.state_dict()
    assert state["w13"].shape[0] == E // size, state["w13"].shape
    assert torch.equal(state["w13"], block.w13[rank * E // size : (rank + 1) * E // size])
    assert state._metadata[""]["moefx_expert_ranges"]["w13"] == (rank * E // size, (rank + 1) * E // size)
    assert block.w13.shape[0] == E


def wrong_size() -> None:
    """A group whose size is not ep_size."""
    try:
        moefx.optimize(Block().eval(), ep_size=dist.get_world_size() * 2)
    except ValueError as error:
        assert str(dist.get_world_size()) in str(error), error
    else:
        raise AssertionError("no ValueError")


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    wrong_size()
    for dtype in (torch.float32, torch.bfloat16):
        same_tokens("none", dtype)
        same_tokens("auto", dtype)
        for a2a in ("all_to_all", "deepep", "mori"):
            own_tokens(a2a, dtype)
    dist.barrier()
    print(f"OK rank {dist.get_rank()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
