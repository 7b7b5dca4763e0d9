"""Mixture-of-experts blocks in the spellings of real code bases. The module, run eagerly, is the truth."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

H, D, E, K = 32, 16, 4, 2


def route(logits: torch.Tensor, k: int = K) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax in fp32, top-k, normalised."""
    values, ids = torch.topk(F.softmax(logits, -1, dtype=torch.float32), k)
    return (values / values.sum(-1, keepdim=True)).to(logits.dtype), ids


class Mlp(nn.Module):
    def __init__(self, width: int = D, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(H, width, bias=bias), nn.Linear(H, width, bias=bias)
        self.down_proj = nn.Linear(width, H, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Gathered(nn.Module):
    """Weights gathered per token, two bmm; `experts` and `act` are overridden by the other spellings."""

    experts_count, hidden, width = E, H, D

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        e, h, d = self.experts_count, self.hidden, self.width
        self.router = nn.Linear(h, e, bias=False)
        self.w13 = nn.Parameter(torch.randn(e, 2 * d, h) * h**-0.5)
        self.w2 = nn.Parameter(torch.randn(e, h, d) * d**-0.5)
        self.b13 = nn.Parameter(torch.randn(e, 2 * d) * 0.1) if bias else None
        self.b2 = nn.Parameter(torch.randn(e, h) * 0.1) if bias else None

    def act(self, y: torch.Tensor) -> torch.Tensor:
        g, u = y.chunk(2, -1)
        return F.silu(g) * u

    def experts(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        flat = ids.reshape(-1)
        y = torch.bmm(self.w13[flat], x.repeat_interleave(ids.shape[1], 0).unsqueeze(-1)).squeeze(-1)
        y = self.act(y if self.b13 is None else y + self.b13[flat])
        y = torch.bmm(self.w2[flat], y.unsqueeze(-1)).squeeze(-1)
        y = y if self.b2 is None else y + self.b2[flat]
        return (y * weights.reshape(-1, 1)).view(x.shape[0], ids.shape[1], self.hidden).sum(1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        x = hidden.reshape(-1, hidden.shape[-1])
        weights, ids = route(self.router(x))
        return self.experts(x, weights, ids).reshape(hidden.shape)


class Loop(Gathered):
    """The default loop of today's Hugging Face models."""

    def experts(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        mask = F.one_hot(ids, self.experts_count).permute(2, 1, 0)
        for e in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            slot, token = torch.where(mask[e[0]])
            y = self.act(F.linear(x[token], self.w13[e[0]], None if self.b13 is None else self.b13[e[0]]))
            y = F.linear(y, self.w2[e[0]], None if self.b2 is None else self.b2[e[0]])
            out.index_add_(0, token, y * weights[token, slot, None])
        return out


class Grouped(Gathered):
    """Sorted tokens, grouped GEMM, index_add."""

    def experts(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        flat = ids.reshape(-1)
        order = torch.argsort(flat)
        offsets = torch.cumsum(torch.bincount(flat, minlength=self.experts_count), 0).to(torch.int32)
        y = F.grouped_mm(x[order // K], self.w13.transpose(-2, -1), offs=offsets)
        y = F.grouped_mm(self.act(y), self.w2.transpose(-2, -1), offs=offsets)
        return torch.zeros_like(x).index_add_(0, order // K, y * weights.reshape(-1)[order, None])


class Dense(Gathered):
    """Every expert on every token, weighted by a dense routing matrix."""

    def experts(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        dense = torch.zeros(x.shape[0], self.experts_count, dtype=x.dtype).scatter_(1, ids, weights)
        y = torch.einsum("ted,ehd->teh", self.act(torch.einsum("th,eoh->teo", x, self.w13)), self.w2)
        return (y * dense.unsqueeze(-1)).sum(1)


class ListLoop(nn.Module):
    """Mixtral-style remote code: one module an expert."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        self.experts = nn.ModuleList(Mlp() for _ in range(E))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        x = hidden.view(-1, H)
        weights, ids = route(self.gate(x))
        out = torch.zeros_like(x)
        mask = F.one_hot(ids, E).permute(2, 1, 0)
        for e in range(E):
            slot, token = torch.where(mask[e])
            out.index_add_(0, token, self.experts[e](x[None, token].reshape(-1, H)) * weights[token, slot, None])
        return out.view(hidden.shape)


class Transposed(Gathered):
    """[E, H, 2D] and [E, D, H] weights, separate products for gate and up."""

    def __init__(self) -> None:
        super().__init__()
        self.w13 = None  # type: ignore[assignment]
        self.w1 = nn.Parameter(torch.randn(E, H, D) * H**-0.5)
        self.w3 = nn.Parameter(torch.randn(E, H, D) * H**-0.5)
        self.w2 = nn.Parameter(torch.randn(E, D, H) * D**-0.5)

    def experts(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        flat = ids.reshape(-1)
        rows = x.repeat_interleave(K, 0).unsqueeze(1)
        g, u = torch.bmm(rows, self.w1[flat]), torch.bmm(rows, self.w3[flat])
        y = torch.bmm(F.silu(g) * u, self.w2[flat]).squeeze(1)
        return (y * weights.reshape(-1, 1)).view(-1, K, H).sum(1)


class ClampPre(Gathered):
    limit = 0.5

    def act(self, y: torch.Tensor) -> torch.Tensor:
        g, u = y.chunk(2, -1)
        return F.silu(g.clamp(max=self.limit)) * u.clamp(-self.limit, self.limit)


class ClampPost(Gathered):
    def act(self, y: torch.Tensor) -> torch.Tensor:
        u, g = y.chunk(2, -1)
        return torch.minimum(F.silu(g), torch.tensor(0.25)) * u.clamp(-0.25, 0.25)


class Oai(Loop):
    def __init__(self) -> None:
        super().__init__(bias=True)

    def act(self, y: torch.Tensor) -> torch.Tensor:
        g, u = y[..., ::2].clamp(max=0.7), y[..., 1::2].clamp(-0.7, 0.7)
        return (u + 1) * (g * torch.sigmoid(g * 1.702))


class Softcap(Gathered):
    """An activation with no name: kept as it is."""

    def act(self, y: torch.Tensor) -> torch.Tensor:
        g, u = y.chunk(2, -1)
        return torch.tanh(g / 3.0) * 3.0 * u.sin()


class GatedShared(Gathered):
    shared_width = D

    def __init__(self) -> None:
        super().__init__()
        self.shared_expert, self.shared_expert_gate = Mlp(self.shared_width), nn.Linear(H, 1, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        x = hidden.view(-1, H)
        weights, ids = route(self.router(x))
        return (self.experts(x, weights, ids) + torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)).view(hidden.shape)


class WideShared(GatedShared):
    """A shared expert three times as wide: three slots."""

    shared_width = 3 * D


class ClampRoutedOnly(GatedShared):
    act = ClampPre.act
    limit = 0.5


class ScaledAfter(GatedShared):
    """Routed part scaled after the experts, a residual beside it."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        x = hidden.view(-1, H)
        weights, ids = route(self.router(x))
        return (2.5 * self.experts(x, weights, ids) + self.shared_expert(x) + x).view(hidden.shape)


class WeightedInput(Gathered):
    """The router weight multiplies the input: not the canonical form."""

    def experts(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        flat = ids.reshape(-1)
        rows = x.repeat_interleave(K, 0) * weights.reshape(-1, 1)
        y = self.act(torch.bmm(self.w13[flat], rows.unsqueeze(-1)).squeeze(-1))
        return torch.bmm(self.w2[flat], y.unsqueeze(-1)).squeeze(-1).view(-1, K, H).sum(1)


class Subset(Loop):
    """A loop that leaves out expert 0: what it computes is not all experts."""

    def experts(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for e in range(1, E):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, F.linear(self.act(F.linear(x[token], self.w13[e])), self.w2[e]) * weights[token, slot, None])
        return out


class Threshold(Gathered):
    """Weights below a threshold are dropped."""

    def experts(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return super().experts(x, torch.where(weights > 0.45, weights, torch.zeros_like(weights)), ids)


class ExpertChoice(Gathered):
    """Experts choose their tokens."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        x = hidden.reshape(-1, H)
        scores = F.softmax(self.router(x), -1)
        weights, token = torch.topk(scores.t(), 1, dim=-1)
        rows = x[token.reshape(-1)].unsqueeze(-1)
        y = torch.bmm(self.w2, self.act(torch.bmm(self.w13, rows).squeeze(-1)).unsqueeze(-1)).squeeze(-1) * weights
        return torch.zeros_like(x).index_add_(0, token.reshape(-1), y).reshape(hidden.shape)
