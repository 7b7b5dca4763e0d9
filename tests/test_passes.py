"""Golden graph text before and after each pass for the Qwen3.5 block. Update with EXPECTTEST_ACCEPT=1."""

from __future__ import annotations

import unittest

import torch
from expecttest import TestCase
from tiny_models import build
from torch import nn

from moefx.capture import Capture, capture
from moefx.decision import decide
from moefx.graph import text
from moefx.kernels.cpu import build as cpu_build
from moefx.kernels.grouped_mm import KERNEL
from moefx.options import Options
from moefx.passes import (
    fuse_shared_expert,
    hoist_weights,
    localize_weights,
    lower_experts,
    normalize,
    raise_experts,
    raise_shared_expert,
    shard_experts,
)
from moefx.rewrite import layer_of


class TestPasses(TestCase):
    block: nn.Module

    @classmethod
    def setUpClass(cls) -> None:
        cls.block = build("qwen3_5_moe").model.layers[0].mlp

    def captured(self) -> Capture:
        return capture(self.block, (torch.randn(2, 7, 64),), {}, 8)

    def raised(self) -> tuple[Capture, raise_experts.Raised]:
        found = self.captured()
        normalize.run(found.graph.graph)
        (routed,), _ = raise_experts.run(found.graph.graph, lambda *_: None)
        return found, routed

    def with_shared(self) -> tuple[Capture, raise_experts.Raised, raise_shared_expert.RaisedShared]:
        found, routed = self.raised()
        shared = raise_shared_expert.run(found.graph.graph, routed)
        assert shared is not None
        return found, routed, shared

    def test_capture(self) -> None:
        self.assertExpectedInline(
            text(self.captured().graph.graph),
            """\
%0 = aten.sym_size.int(%hidden_states, 0)
%1 = aten.sym_size.int(%hidden_states, 1)
%2 = aten.view(%hidden_states, [-1, 64])
%3 = aten.linear(%2, shared_expert.gate_proj.weight)
%4 = aten.silu(%3)
%5 = aten.linear(%2, shared_expert.up_proj.weight)
%6 = aten.mul.Tensor(%4, %5)
%7 = aten.linear(%6, shared_expert.down_proj.weight)
%8 = aten.view(%2, [-1, 64])
%9 = aten.linear(%8, gate.weight)
%10 = aten.softmax.int(%9, -1, float32)
%11 = aten.topk(%10, 2)
%12 = getitem(%11, 0)
%13 = getitem(%11, 1)
%14 = aten.sum.dim_IntList(%12, [-1], True)
%15 = aten.div.Tensor(%12, %14)
%16 = aten._assert_tensor_metadata(%15, None, None, float32, device=device(type='cpu'), layout=torch.strided)
%17 = aten.view(%13, [-1])
%18 = aten.sort(%17)
%19 = getitem(%18, 0)
%20 = getitem(%18, 1)
%21 = aten.floor_divide(%20, 2)
%22 = aten.index.Tensor(%2, [%21])
%23 = aten.view(%15, [-1])
%24 = aten.index.Tensor(%23, [%20])
%25 = aten._assert_tensor_metadata(%19, None, None, int64, device=device(type='cpu'), layout=torch.strided)
%26 = aten._to_copy(%19, dtype=float32)
%27 = aten.histc(%26, 8, 0, 7)
%28 = aten.cumsum(%27, 0, dtype=int32)
%29 = aten.transpose.int(experts.gate_up_proj, -2, -1)
%30 = aten._assert_tensor_metadata(%22, None, None, float32, device=device(type='cpu'), layout=torch.strided)
%31 = transformers.grouped_mm_fallback(%22, %29, %28)
%32 = aten.split.Tensor(%31, 32, -1)
%33 = getitem(%32, 0)
%34 = getitem(%32, 1)
%35 = aten.silu(%33)
%36 = aten.mul.Tensor(%35, %34)
%37 = aten.transpose.int(experts.down_proj, -2, -1)
%38 = aten._assert_tensor_metadata(%36, None, None, float32, device=device(type='cpu'), layout=torch.strided)
%39 = transformers.grouped_mm_fallback(%36, %37, %28)
%40 = aten.unsqueeze(%24, -1)
%41 = aten.mul.Tensor(%39, %40)
%42 = aten.empty_like(%20, pin_memory=False)
%43 = mul(2, %0)
%44 = mul(%43, %1)
%45 = aten.arange(%44, device=device(type='cpu'), pin_memory=False)
%46 = aten.index_put(%42, [%20], %45)
%47 = aten.index.Tensor(%41, [%46])
%48 = mul(%0, %1)
%49 = aten.view(%47, [%48, 2, 64])
%50 = aten.sum.dim_IntList(%49, [1])
%51 = aten._assert_tensor_metadata(%50, None, None, float32, device=device(type='cpu'), layout=torch.strided)
%52 = aten.linear(%2, shared_expert_gate.weight)
%53 = aten.sigmoid(%52)
%54 = aten.mul.Tensor(%53, %7)
%55 = aten.add.Tensor(%50, %54)
%56 = aten.view(%55, [%0, %1, 64])
return (%56)""",
        )

    def test_normalize(self) -> None:
        found = self.captured()
        normalize.run(found.graph.graph)
        self.assertExpectedInline(
            text(found.graph.graph),
            """\
%0 = aten.sym_size.int(%hidden_states, 0)
%1 = aten.sym_size.int(%hidden_states, 1)
%2 = aten.reshape(%hidden_states, [-1, 64])
%3 = aten.linear(%2, shared_expert.gate_proj.weight)
%4 = aten.silu(%3)
%5 = aten.linear(%2, shared_expert.up_proj.weight)
%6 = aten.mul.Tensor(%4, %5)
%7 = aten.linear(%6, shared_expert.down_proj.weight)
%8 = aten.linear(%2, gate.weight)
%9 = aten.softmax.int(%8, -1, float32)
%10 = aten.topk(%9, 2)
%11 = getitem(%10, 0)
%12 = getitem(%10, 1)
%13 = aten.sum.dim_IntList(%11, [-1], True)
%14 = aten.div.Tensor(%11, %13)
%15 = aten.reshape(%12, [-1])
%16 = aten.sort(%15)
%17 = getitem(%16, 0)
%18 = getitem(%16, 1)
%19 = aten.floor_divide(%18, 2)
%20 = aten.index.Tensor(%2, [%19])
%21 = aten.reshape(%14, [-1])
%22 = aten.index.Tensor(%21, [%18])
%23 = aten._to_copy(%17, dtype=float32)
%24 = aten.histc(%23, 8, 0, 7)
%25 = aten.cumsum(%24, 0, dtype=int32)
%26 = aten.transpose.int(experts.gate_up_proj, -2, -1)
%27 = transformers.grouped_mm_fallback(%20, %26, %25)
%28 = aten.split.Tensor(%27, 32, -1)
%29 = getitem(%28, 0)
%30 = getitem(%28, 1)
%31 = aten.silu(%29)
%32 = aten.mul.Tensor(%31, %30)
%33 = aten.transpose.int(experts.down_proj, -2, -1)
%34 = transformers.grouped_mm_fallback(%32, %33, %25)
%35 = aten.unsqueeze(%22, -1)
%36 = aten.mul.Tensor(%34, %35)
%37 = aten.empty_like(%18, pin_memory=False)
%38 = mul(2, %0)
%39 = mul(%38, %1)
%40 = aten.arange(%39, device=device(type='cpu'), pin_memory=False)
%41 = aten.index_put(%37, [%18], %40)
%42 = aten.index.Tensor(%36, [%41])
%43 = mul(%0, %1)
%44 = aten.reshape(%42, [%43, 2, 64])
%45 = aten.sum.dim_IntList(%44, [1])
%46 = aten.linear(%2, shared_expert_gate.weight)
%47 = aten.sigmoid(%46)
%48 = aten.mul.Tensor(%47, %7)
%49 = aten.add.Tensor(%45, %48)
%50 = aten.reshape(%49, [%0, %1, 64])
return (%50)""",
        )

    def test_raise_experts(self) -> None:
        found, routed = self.raised()
        self.assertExpectedInline(
            text(found.graph.graph),
            """\
%0 = aten.sym_size.int(%hidden_states, 0)
%1 = aten.sym_size.int(%hidden_states, 1)
%2 = aten.reshape(%hidden_states, [-1, 64])
%3 = aten.linear(%2, shared_expert.gate_proj.weight)
%4 = aten.silu(%3)
%5 = aten.linear(%2, shared_expert.up_proj.weight)
%6 = aten.mul.Tensor(%4, %5)
%7 = aten.linear(%6, shared_expert.down_proj.weight)
%8 = aten.linear(%2, gate.weight)
%9 = aten.softmax.int(%8, -1, float32)
%10 = aten.topk(%9, 2)
%11 = getitem(%10, 0)
%12 = getitem(%10, 1)
%13 = aten.sum.dim_IntList(%11, [-1], True)
%14 = aten.div.Tensor(%11, %13)
%15 = moefx.experts(%2, %12, %14, experts.gate_up_proj, None, experts.down_proj, None, '{"alpha": 1.0, "beta": 0.0, "clamp": null, "columns": "concat", "kind": "swiglu", "limit": null}')
%16 = aten.linear(%2, shared_expert_gate.weight)
%17 = aten.sigmoid(%16)
%18 = aten.mul.Tensor(%17, %7)
%19 = aten.add.Tensor(%15, %18)
%20 = aten.reshape(%19, [%0, %1, 64])
return (%20)""",
        )
        assert (routed.form, routed.experts, routed.top_k, routed.intermediate, routed.hidden) == ("grouped_mm", 8, 2, 32, 64)

    def test_raise_shared_expert(self) -> None:
        found, _, shared = self.with_shared()
        self.assertExpectedInline(
            text(found.graph.graph),
            """\
%0 = aten.sym_size.int(%hidden_states, 0)
%1 = aten.sym_size.int(%hidden_states, 1)
%2 = aten.reshape(%hidden_states, [-1, 64])
%3 = aten.linear(%2, gate.weight)
%4 = aten.softmax.int(%3, -1, float32)
%5 = aten.topk(%4, 2)
%6 = getitem(%5, 0)
%7 = getitem(%5, 1)
%8 = aten.sum.dim_IntList(%6, [-1], True)
%9 = aten.div.Tensor(%6, %8)
%10 = moefx.experts(%2, %7, %9, experts.gate_up_proj, None, experts.down_proj, None, '{"alpha": 1.0, "beta": 0.0, "clamp": null, "columns": "concat", "kind": "swiglu", "limit": null}')
%11 = aten.linear(%2, shared_expert_gate.weight)
%12 = aten.sigmoid(%11)
%13 = aten.cat([shared_expert.gate_proj.weight, shared_expert.up_proj.weight], 0)
%14 = moefx.shared_expert(%2, %12, %13, None, shared_expert.down_proj.weight, None, '{"alpha": 1.0, "beta": 0.0, "clamp": null, "columns": "separate", "kind": "swiglu", "limit": null}')
%15 = aten.add.Tensor(%10, %14)
%16 = aten.reshape(%15, [%0, %1, 64])
return (%16)""",
        )
        assert (shared.gate, shared.intermediate, shared.why_unfused) == ("sigmoid", 32, None)

    def test_fuse_shared_expert(self) -> None:
        found, routed, shared = self.with_shared()
        fuse_shared_expert.run(found.graph.graph, routed, shared)
        self.assertExpectedInline(
            text(found.graph.graph),
            """\
%0 = aten.sym_size.int(%hidden_states, 0)
%1 = aten.sym_size.int(%hidden_states, 1)
%2 = aten.reshape(%hidden_states, [-1, 64])
%3 = aten.linear(%2, gate.weight)
%4 = aten.softmax.int(%3, -1, float32)
%5 = aten.topk(%4, 2)
%6 = getitem(%5, 0)
%7 = getitem(%5, 1)
%8 = aten.sum.dim_IntList(%6, [-1], True)
%9 = aten.div.Tensor(%6, %8)
%10 = aten.linear(%2, shared_expert_gate.weight)
%11 = aten.sigmoid(%10)
%12 = aten.cat([shared_expert.gate_proj.weight, shared_expert.up_proj.weight], 0)
%13 = aten.slice.Tensor(%7, 1, 0, 1)
%14 = aten.full_like(%13, 8)
%15 = aten.cat([%7, %14], 1)
%16 = aten.cat([%9, %11], 1)
%17 = aten.slice.Tensor(%12, 0, 0, 32)
%18 = aten.slice.Tensor(%12, 0, 32, 64)
%19 = aten.cat([%17, %18], 0)
%20 = aten.unsqueeze(%19, 0)
%21 = aten.unsqueeze(shared_expert.down_proj.weight, 0)
%22 = aten.cat([experts.gate_up_proj, %20], 0)
%23 = aten.cat([experts.down_proj, %21], 0)
%24 = moefx.experts(%2, %15, %16, %22, None, %23, None, '{"alpha": 1.0, "beta": 0.0, "clamp": null, "columns": "concat", "kind": "swiglu", "limit": null}')
%25 = aten.reshape(%24, [%0, %1, 64])
return (%25)""",
        )

    def test_shard_experts_on_virtual_ranks(self) -> None:
        found, routed = self.raised()
        shard_experts.run(found.graph.graph, routed.node, 8, Options(ep_size=2))
        self.assertExpectedInline(
            text(found.graph.graph),
            """\
%0 = aten.sym_size.int(%hidden_states, 0)
%1 = aten.sym_size.int(%hidden_states, 1)
%2 = aten.reshape(%hidden_states, [-1, 64])
%3 = aten.linear(%2, shared_expert.gate_proj.weight)
%4 = aten.silu(%3)
%5 = aten.linear(%2, shared_expert.up_proj.weight)
%6 = aten.mul.Tensor(%4, %5)
%7 = aten.linear(%6, shared_expert.down_proj.weight)
%8 = aten.linear(%2, gate.weight)
%9 = aten.softmax.int(%8, -1, float32)
%10 = aten.topk(%9, 2)
%11 = getitem(%10, 0)
%12 = getitem(%10, 1)
%13 = aten.sum.dim_IntList(%11, [-1], True)
%14 = aten.div.Tensor(%11, %13)
%15 = aten.slice.Tensor(experts.gate_up_proj, 0, 0, 4)
%16 = aten.slice.Tensor(experts.down_proj, 0, 0, 4)
%17 = moefx.experts(%2, %12, %14, %15, None, %16, None, '{"alpha": 1.0, "beta": 0.0, "clamp": null, "columns": "concat", "kind": "swiglu", "limit": null}', 0)
%18 = aten.slice.Tensor(experts.gate_up_proj, 0, 4, 8)
%19 = aten.slice.Tensor(experts.down_proj, 0, 4, 8)
%20 = moefx.experts(%2, %12, %14, %18, None, %19, None, '{"alpha": 1.0, "beta": 0.0, "clamp": null, "columns": "concat", "kind": "swiglu", "limit": null}', 4)
%21 = aten.add.Tensor(%17, %20)
%22 = aten.linear(%2, shared_expert_gate.weight)
%23 = aten.sigmoid(%22)
%24 = aten.mul.Tensor(%23, %7)
%25 = aten.add.Tensor(%21, %24)
%26 = aten.reshape(%25, [%0, %1, 64])
return (%26)""",
        )

    def test_lower_and_hoist(self) -> None:
        found, routed, shared = self.with_shared()
        node = fuse_shared_expert.run(found.graph.graph, routed, shared)
        lower_experts.run(found.graph.graph, [node], KERNEL)
        self.assertExpectedInline(
            text(found.graph.graph),
            """\
%0 = aten.sym_size.int(%hidden_states, 0)
%1 = aten.sym_size.int(%hidden_states, 1)
%2 = aten.reshape(%hidden_states, [-1, 64])
%3 = aten.linear(%2, gate.weight)
%4 = aten.softmax.int(%3, -1, float32)
%5 = aten.topk(%4, 2)
%6 = getitem(%5, 0)
%7 = getitem(%5, 1)
%8 = aten.sum.dim_IntList(%6, [-1], True)
%9 = aten.div.Tensor(%6, %8)
%10 = aten.linear(%2, shared_expert_gate.weight)
%11 = aten.sigmoid(%10)
%12 = aten.cat([shared_expert.gate_proj.weight, shared_expert.up_proj.weight], 0)
%13 = aten.slice.Tensor(%7, 1, 0, 1)
%14 = aten.full_like(%13, 8)
%15 = aten.cat([%7, %14], 1)
%16 = aten.cat([%9, %11], 1)
%17 = aten.slice.Tensor(%12, 0, 0, 32)
%18 = aten.slice.Tensor(%12, 0, 32, 64)
%19 = aten.cat([%17, %18], 0)
%20 = aten.unsqueeze(%19, 0)
%21 = aten.unsqueeze(shared_expert.down_proj.weight, 0)
%22 = aten.cat([experts.gate_up_proj, %20], 0)
%23 = aten.cat([experts.down_proj, %21], 0)
%24 = as_given(%22, None, %23, None, '{"alpha": 1.0, "beta": 0.0, "clamp": null, "columns": "concat", "kind": "swiglu", "limit": null}')
%25 = getitem(%24, 0)
%26 = getitem(%24, 2)
%27 = moefx.experts_grouped_mm(%2, %15, %16, %25, None, %26, None, '{"alpha": 1.0, "beta": 0.0, "clamp": null, "columns": "concat", "kind": "swiglu", "limit": null}', 0)
%28 = aten.reshape(%27, [%0, %1, 64])
return (%28)""",
        )
        hoisted = hoist_weights.run(found.graph.graph)
        self.assertExpectedInline(
            text(found.graph.graph),
            """\
%0 = aten.sym_size.int(%hidden_states, 0)
%1 = aten.sym_size.int(%hidden_states, 1)
%2 = aten.reshape(%hidden_states, [-1, 64])
%3 = aten.linear(%2, gate.weight)
%4 = aten.softmax.int(%3, -1, float32)
%5 = aten.topk(%4, 2)
%6 = getitem(%5, 0)
%7 = getitem(%5, 1)
%8 = aten.sum.dim_IntList(%6, [-1], True)
%9 = aten.div.Tensor(%6, %8)
%10 = aten.linear(%2, shared_expert_gate.weight)
%11 = aten.sigmoid(%10)
%12 = aten.slice.Tensor(%7, 1, 0, 1)
%13 = aten.full_like(%12, 8)
%14 = aten.cat([%7, %13], 1)
%15 = aten.cat([%9, %11], 1)
%16 = moefx.experts_grouped_mm(%2, %14, %15, %packed_0, None, %packed_1, None, '{"alpha": 1.0, "beta": 0.0, "clamp": null, "columns": "concat", "kind": "swiglu", "limit": null}', 0)
%17 = aten.reshape(%16, [%0, %1, 64])
return (%17)""",
        )
        assert hoisted.pack is not None
        self.assertExpectedInline(
            text(hoisted.pack.graph),
            """\
%0 = aten.cat([%p_shared_expert_gate_proj_weight, %p_shared_expert_up_proj_weight], 0)
%1 = aten.slice.Tensor(%0, 0, 0, 32)
%2 = aten.slice.Tensor(%0, 0, 32, 64)
%3 = aten.cat([%1, %2], 0)
%4 = aten.unsqueeze(%3, 0)
%5 = aten.unsqueeze(%p_shared_expert_down_proj_weight, 0)
%6 = aten.cat([%p_experts_gate_up_proj, %4], 0)
%7 = aten.cat([%p_experts_down_proj, %5], 0)
%8 = as_given(%6, None, %7, None, '{"alpha": 1.0, "beta": 0.0, "clamp": null, "columns": "concat", "kind": "swiglu", "limit": null}')
%9 = getitem(%8, 0)
%10 = getitem(%8, 2)
return (%9, %10)""",
        )
        assert hoisted.sources[0] == "experts.gate_up_proj"

    def test_localize_weights(self) -> None:
        found, routed = self.raised()
        graph = found.graph.graph
        before = {n.meta["weight"] for n in graph.nodes if "weight" in n.meta and n.users}
        nodes = shard_experts.run(graph, routed.node, 8, Options(ep_size=2))
        nodes[0].replace_all_uses_with(nodes[1])
        graph.eliminate_dead_code()
        local = localize_weights.run(graph, before)
        assert local.rows == {"experts.gate_up_proj": (4, 8), "experts.down_proj": (4, 8)}
        assert local.dropped == ()

    def test_the_plan_sees_the_block(self) -> None:
        _, routed, shared = self.with_shared()
        decision = decide(layer_of("mlp", routed, shared), Options(ep_size=2))
        assert decision.kernel is not None and decision.kernel.name == ("cpu_packed" if cpu_build.isa() else "grouped_mm")
        assert (decision.placement, decision.slots, decision.E) == ("fused", 1, 4)


if __name__ == "__main__":
    unittest.main()
