"""Spellings beyond `moe_blocks` that must be rewritten."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from moe_blocks import D, E, Gathered, H, K, ListLoop, Loop, Mlp, route
from torch import nn


class BoolMask(Gathered):
    def experts(self, x, w, ids):
        out = torch.zeros_like(x)
        for e in range(E):
            m = (ids == e).any(-1)
            if m.any():
                out[m] += F.linear(self.act(F.linear(x[m], self.w13[e])), self.w2[e]) * (w * (ids == e)).sum(-1)[m].unsqueeze(-1)
        return out


class NumelContinue(Gathered):
    def experts(self, x, w, ids):
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            if tok.numel() == 0:
                continue
            out.index_add_(0, tok, F.linear(self.act(F.linear(x[tok], self.w13[e])), self.w2[e]) * w[tok, slot].unsqueeze(-1))
        return out


class MoeInfer(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        self.experts = nn.ModuleList(Mlp() for _ in range(E))

    def forward(self, h):
        x = h.view(-1, H)
        w, ids = route(self.gate(x))
        cnts = ids.new_zeros((ids.shape[0], E))
        cnts.scatter_(1, ids, 1)
        tpe = cnts.sum(dim=0)
        idxs = ids.view(-1).argsort()
        st = x[idxs // ids.shape[1]]
        tpe = tpe.cpu().numpy()
        outs = []
        start = 0
        for i, n in enumerate(tpe):
            end = start + n
            if n == 0:
                continue
            outs.append(self.experts[i](st[start:end]))
            start = end
        outs = torch.cat(outs, 0) if len(outs) else st.new_empty(0)
        nx = torch.empty_like(outs)
        nx[idxs] = outs
        return nx.view(*ids.shape, -1).type(w.dtype).mul_(w.unsqueeze(-1)).sum(dim=1).type(nx.dtype).view(h.shape)


class SplitLoop(Gathered):
    def experts(self, x, w, ids):
        flat = ids.reshape(-1)
        order = torch.argsort(flat, stable=True)
        n = torch.bincount(flat, minlength=E).tolist()
        parts = torch.split(x[order // K], n)
        outs = [F.linear(self.act(F.linear(p, self.w13[e])), self.w2[e]) for e, p in enumerate(parts)]
        y = torch.cat(outs, 0) * w.reshape(-1)[order].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, order // K, y)


class UniqueLoop(Gathered):
    def experts(self, x, w, ids):
        out = torch.zeros_like(x)
        for e in torch.unique(ids):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, F.linear(self.act(F.linear(x[tok], self.w13[e])), self.w2[e]) * w[tok, slot].unsqueeze(-1))
        return out


class DictTop1(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(H, E, bias=False)
        self.experts = nn.ModuleDict({f"expert_{i}": Mlp() for i in range(E)})

    def forward(self, h):
        x = h.reshape(-1, H)
        p = F.softmax(self.router(x), -1)
        w, ids = p.max(-1)
        out = torch.zeros_like(x)
        for i, e in enumerate(self.experts.values()):
            m = ids == i
            out[m] = e(x[m]) * w[m].unsqueeze(-1)
        return out.view(h.shape)


class Permuted(Gathered):
    def __init__(self):
        super().__init__()
        self.register_buffer("perm", torch.tensor([2, 0, 3, 1]))

    def experts(self, x, w, ids):
        return super().experts(x, w, self.perm[ids])


class PermLoop(Loop):
    def experts(self, x, w, ids):
        out = torch.zeros_like(x)
        for i, e in enumerate([2, 0, 3, 1]):
            tok, slot = torch.where(ids == i)
            out.index_add_(0, tok, F.linear(self.act(F.linear(x[tok], self.w13[e])), self.w2[e]) * w[tok, slot].unsqueeze(-1))
        return out


class SharedWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        a = Mlp()
        self.experts = nn.ModuleList([a, Mlp(), a, Mlp()])

    forward = ListLoop.forward


class PerExpertScale(Gathered):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(E) + 0.5)

    def experts(self, x, w, ids):
        return super().experts(x, w * self.scale[ids], ids)


class K1Squeezed(Gathered):
    def forward(self, h):
        x = h.reshape(-1, H)
        p = F.softmax(self.router(x), -1)
        w, ids = p.max(-1)
        y = torch.bmm(self.w2[ids], self.act(torch.bmm(self.w13[ids], x.unsqueeze(-1)).squeeze(-1)).unsqueeze(-1)).squeeze(-1)
        return (y * w.unsqueeze(-1)).reshape(h.shape)


class KAll(Gathered):
    def forward(self, h):
        x = h.reshape(-1, H)
        w, ids = route(self.router(x), E)
        return self.experts(x, w, ids).reshape(h.shape)


class SquareT(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(H, E, bias=False)
        self.w13 = nn.Parameter(torch.randn(E, H, 2 * 16) * H**-0.5)
        self.w2 = nn.Parameter(torch.randn(E, 16, H) * 0.25)

    def forward(self, h):
        x = h.reshape(-1, H)
        w, ids = route(self.router(x))
        f = ids.reshape(-1)
        y = torch.bmm(x.repeat_interleave(K, 0).unsqueeze(1), self.w13[f]).squeeze(1)
        g, u = y.chunk(2, -1)
        y = torch.bmm((F.silu(g) * u).unsqueeze(1), self.w2[f]).squeeze(1)
        return (y * w.reshape(-1, 1)).view(-1, K, H).sum(1).reshape(h.shape)


class TupleOut(Gathered):
    def forward(self, h):
        x = h.reshape(-1, H)
        logits = self.router(x)
        w, ids = route(logits)
        return self.experts(x, w, ids).reshape(h.shape), logits, None, {"ids": ids}


class WeightsF32(Gathered):
    def experts(self, x, w, ids):
        f = ids.reshape(-1)
        y = torch.bmm(self.w13[f], x.repeat_interleave(K, 0).unsqueeze(-1)).squeeze(-1)
        y = torch.bmm(self.w2[f], self.act(y).unsqueeze(-1)).squeeze(-1)
        return (y * w.reshape(-1, 1).float()).view(-1, K, H).sum(1).to(x.dtype)


class SkipZero(Gathered):
    def experts(self, x, w, ids):
        out = torch.zeros_like(x)
        dense = torch.zeros(x.shape[0], E).scatter_(1, ids, w)
        for e in range(E):
            tok = torch.where(dense[:, e] > 0)[0]
            out.index_add_(0, tok, F.linear(self.act(F.linear(x[tok], self.w13[e])), self.w2[e]) * dense[tok, e].unsqueeze(-1))
        return out


class LnMid(Gathered):
    def act(self, y):
        return F.layer_norm(super().act(y), (D,))


class IdsMod(Gathered):
    def experts(self, x, w, ids):
        return super().experts(x, w, (ids + 1) % E)


class RandIds(Gathered):
    def forward(self, h):
        x = h.reshape(-1, H)
        ids = (x[:, :2] * 1000).long().abs() % E
        w = torch.sigmoid(x[:, 2:4])
        return self.experts(x, w, ids).reshape(h.shape)


class Flat(Gathered):
    def __init__(self):
        super().__init__()
        self.w13 = None
        self.w1 = nn.Parameter(torch.randn(E * D, H) * H**-0.5)
        self.v1 = nn.Parameter(torch.randn(E * D, H) * H**-0.5)
        self.w2 = nn.Parameter(torch.randn(E * D, H) * D**-0.5)
        self.num_experts = E

    def experts(self, x, w, ids):
        out = torch.zeros_like(x)
        w1 = self.w1.view(E, D, H)
        v1 = self.v1.view(E, D, H)
        w2 = self.w2.view(E, D, H)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            if tok.shape[0] == 0:
                continue
            h = F.silu(x[tok].matmul(w1[e].t())) * x[tok].matmul(v1[e].t())
            out.index_add_(0, tok, h.matmul(w2[e]) * w[tok, slot].unsqueeze(-1))
        return out


class NonzeroTuple(Gathered):
    def experts(self, x, w, ids):
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.nonzero(ids == e, as_tuple=True)
            out.index_put_(
                (tok,), F.linear(self.act(F.linear(x[tok], self.w13[e])), self.w2[e]) * w[tok, slot].unsqueeze(-1), accumulate=True
            )
        return out


class SeqExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(H, E)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(H, D), nn.SiLU(), nn.Linear(D, H)) for _ in range(E))

    def forward(self, h):
        x = h.reshape(-1, H)
        w, ids = route(self.gate(x))
        out = torch.zeros_like(x)
        for i, e in enumerate(self.experts):
            tok, slot = torch.where(ids == i)
            out[tok] += w[tok, slot, None] * e(x[tok])
        return out.reshape(h.shape)


class IndexSelect(Gathered):
    def experts(self, x, w, ids):
        f = ids.flatten()
        a = torch.index_select(self.w13, 0, f)
        b = torch.index_select(self.w2, 0, f)
        y = torch.baddbmm(torch.zeros(f.shape[0], 2 * D, 1), a, x.repeat_interleave(K, 0)[:, :, None])[..., 0]
        y = torch.bmm(b, self.act(y)[:, :, None])[..., 0]
        return (y * w.flatten()[:, None]).reshape(-1, K, H).sum(1)


class DenseBool(Gathered):
    def experts(self, x, w, ids):
        dense = torch.zeros(x.shape[0], E).scatter(1, ids, w)
        out = torch.zeros_like(x)
        for e in range(E):
            out = out + F.linear(self.act(F.linear(x, self.w13[e])), self.w2[e]) * dense[:, e : e + 1]
        return out
