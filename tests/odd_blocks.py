"""Blocks that must be left alone, and odd shared experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from moe_blocks import D, E, GatedShared, Gathered, H, K, Mlp, route
from torch import nn


class Capacity(Gathered):
    def experts(self, x, w, ids):
        out = torch.zeros_like(x)
        cap = 5
        for e in range(E):
            tok, slot = torch.where(ids == e)
            tok, slot = tok[:cap], slot[:cap]
            out.index_add_(0, tok, F.linear(self.act(F.linear(x[tok], self.w13[e])), self.w2[e]) * w[tok, slot].unsqueeze(-1))
        return out


class BigCapacity(Capacity):
    def experts(self, x, w, ids):
        out = torch.zeros_like(x)
        cap = 700
        for e in range(E):
            tok, slot = torch.where(ids == e)
            tok, slot = tok[:cap], slot[:cap]
            out.index_add_(0, tok, F.linear(self.act(F.linear(x[tok], self.w13[e])), self.w2[e]) * w[tok, slot].unsqueeze(-1))
        return out


class TCap(Gathered):
    def experts(self, x, w, ids):
        out = torch.zeros_like(x)
        cap = max(4, int(x.shape[0] * K / E * 1.25))
        for e in range(E):
            tok, slot = torch.where(ids == e)
            tok, slot = tok[:cap], slot[:cap]
            out.index_add_(0, tok, F.linear(self.act(F.linear(x[tok], self.w13[e])), self.w2[e]) * w[tok, slot].unsqueeze(-1))
        return out


class DiffAct(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        self.experts = nn.ModuleList(Mlp() for _ in range(E))

    def forward(self, h):
        x = h.view(-1, H)
        w, ids = route(self.gate(x))
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            m = self.experts[e]
            a = F.gelu if e == 2 else F.silu
            out.index_add_(0, tok, m.down_proj(a(m.gate_proj(x[tok])) * m.up_proj(x[tok])) * w[tok, slot, None])
        return out.view(h.shape)


class OutScale(Gathered):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(E) + 0.5)

    def experts(self, x, w, ids):
        f = ids.reshape(-1)
        y = torch.bmm(self.w13[f], x.repeat_interleave(K, 0).unsqueeze(-1)).squeeze(-1)
        y = torch.bmm(self.w2[f], self.act(y).unsqueeze(-1)).squeeze(-1) * self.scale[f].unsqueeze(-1)
        return (y * w.reshape(-1, 1)).view(-1, K, H).sum(1)


class Soft(Gathered):
    def forward(self, h):
        x = h.reshape(-1, H)
        p = F.softmax(self.router(x), -1)
        y = torch.einsum("ted,ehd->teh", self.act(torch.einsum("th,eoh->teo", x, self.w13)), self.w2)
        return (y * p.unsqueeze(-1)).sum(1).reshape(h.shape)


class TwoShared(Gathered):
    def __init__(self):
        super().__init__()
        self.a, self.b = Mlp(), Mlp()

    def forward(self, h):
        x = h.view(-1, H)
        w, ids = route(self.router(x))
        return (self.experts(x, w, ids) + self.a(x) + self.b(x)).view(h.shape)


class BiasShared(Gathered):
    def __init__(self):
        super().__init__()
        self.a = Mlp(D, True)

    def forward(self, h):
        x = h.view(-1, H)
        w, ids = route(self.router(x))
        return (self.experts(x, w, ids) + self.a(x)).view(h.shape)


class BiasBoth(Gathered):
    def __init__(self):
        super().__init__(bias=True)
        self.a = Mlp(2 * D, True)

    def forward(self, h):
        x = h.view(-1, H)
        w, ids = route(self.router(x))
        return (self.a(x) + self.experts(x, w, ids)).view(h.shape)


class GateScaled(GatedShared):
    def forward(self, h):
        x = h.view(-1, H)
        w, ids = route(self.router(x))
        return (self.experts(x, w, ids) + 0.5 * torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)).view(h.shape)


class SharedOnOther(GatedShared):
    def forward(self, h):
        x = h.view(-1, H)
        w, ids = route(self.router(x))
        return (self.experts(x, w, ids) + self.shared_expert(x + 1)).view(h.shape)


class SharedMinus(GatedShared):
    def forward(self, h):
        x = h.view(-1, H)
        w, ids = route(self.router(x))
        return (self.experts(x, w, ids) - self.shared_expert(x)).view(h.shape)


class BothScaled(GatedShared):
    def forward(self, h):
        x = h.view(-1, H)
        w, ids = route(self.router(x))
        return (2.0 * (self.experts(x, w, ids) + self.shared_expert(x)) + x).view(h.shape)


class Counter(Gathered):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(E))

    def forward(self, h):
        x = h.reshape(-1, H)
        w, ids = route(self.router(x))
        self.count += torch.bincount(ids.reshape(-1), minlength=E)
        return self.experts(x, w, ids).reshape(h.shape)


class TBranch(Gathered):
    def forward(self, h):
        if h.shape[1] > 100:
            return super().forward(h) * 2
        return super().forward(h)


class Thr(Gathered):
    def experts(self, x, w, ids):
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where((ids == e) & (w > 0.3))
            out.index_add_(0, tok, F.linear(self.act(F.linear(x[tok], self.w13[e])), self.w2[e]) * w[tok, slot].unsqueeze(-1))
        return out


class NormOut(Gathered):
    def experts(self, x, w, ids):
        f = ids.reshape(-1)
        y = torch.bmm(self.w13[f], x.repeat_interleave(K, 0).unsqueeze(-1)).squeeze(-1)
        y = torch.bmm(self.w2[f], self.act(y).unsqueeze(-1)).squeeze(-1)
        y = F.rms_norm(y, (H,))
        return (y * w.reshape(-1, 1)).view(-1, K, H).sum(1)


class IntCounts(Gathered):
    def experts(self, x, w, ids):
        out = torch.zeros_like(x)
        counts = torch.bincount(ids.reshape(-1), minlength=E)
        for e in range(E):
            n = int(counts[e])
            if n == 0:
                continue
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, F.linear(self.act(F.linear(x[tok], self.w13[e])), self.w2[e]) * w[tok, slot].unsqueeze(-1) * (1 + 0 * n))
        return out


class Chunked(Gathered):
    def experts(self, x, w, ids):
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            for i in range(0, tok.shape[0], 4):
                t, s2 = tok[i : i + 4], slot[i : i + 4]
                out.index_add_(0, t, F.linear(self.act(F.linear(x[t], self.w13[e])), self.w2[e]) * w[t, s2].unsqueeze(-1))
        return out
