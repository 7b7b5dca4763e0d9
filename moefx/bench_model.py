"""`moefx bench --model`: prefill and generation of a whole model, moefx against transformers' own forms, interleaved."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def build(layers: int) -> Any:
    """A Qwen3.5-MoE with the 35B-A3B's layer sizes and random bf16 weights; attention is full in every layer, the vocabulary small.

    ValueError without transformers.
    """
    try:
        from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
    except ImportError as error:
        raise ValueError("the model comes from transformers: pip install moefx[transformers]") from error
    config = Qwen3_5MoeTextConfig(
        num_hidden_layers=layers, vocab_size=1024, layer_types=["full_attention"] * layers, max_position_embeddings=4096
    )
    with torch.device("meta"):
        model: Any = Qwen3_5MoeForCausalLM(config)
    model.to(torch.bfloat16).to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.zero_()
            else:
                parameter.normal_(0, 0.2 if name.endswith("gate.weight") else parameter.shape[-1] ** -0.5)
        for module in model.modules():
            if hasattr(module, "inv_freq"):
                module.inv_freq.copy_(1.0 / 10000 ** (torch.arange(module.inv_freq.numel()) / module.inv_freq.numel()))
    return model.eval()


def end_to_end(layers: int = 4, prompt: int = 64, new_tokens: int = 16, rounds: int = 5, compiled: bool = False) -> dict[str, Any]:
    """`{"layers", "prompt", "new_tokens", "rows": [{"form", "prefill_tokens_a_second", "generate_tokens_a_second", "ratio..."}]}`.

    The first row is moefx; ratios are its speed over the row's. Every form runs once before the clock starts, and must give moefx's logits.
    """
    import moefx
    from moefx.swap import copy_sharing_tensors

    model = build(layers)
    result = moefx.optimize(model)
    ids = torch.randint(0, 1024, (1, prompt), generator=torch.Generator().manual_seed(0))
    forms: dict[str, Callable[[], Any]] = {"moefx": lambda: result}
    for name in ("eager", "grouped_mm"):
        forms[f"transformers_{name}"] = functools.partial(_with_form, model, name)
    if compiled:
        copy = copy_sharing_tensors(_with_form(model, "grouped_mm"))
        copy.forward = torch.compile(copy.forward)
        forms["transformers_grouped_mm_compiled"] = lambda: copy
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in forms}
    with torch.inference_mode():
        want = result(ids).logits.float()
        for name, form in forms.items():
            difference = _difference(form()(ids).logits.float(), want)
            if difference > 0.1:
                raise RuntimeError(f"{name} differs from moefx by {difference:.2g} of a token's logits: a comparison would mean nothing")
            _generate(form(), ids, 2)
        for _ in range(rounds):
            for name, form in forms.items():
                chosen = form()
                started = time.perf_counter()
                chosen(ids)
                middle = time.perf_counter()
                _generate(chosen, ids[:, :1], new_tokens)
                times[name].append((middle - started, time.perf_counter() - middle))
    medians = {n: (statistics.median(p for p, _ in t), statistics.median(g for _, g in t)) for n, t in times.items()}
    own = medians["moefx"]
    rows = [
        {
            "form": name,
            "prefill_tokens_a_second": round(prompt / prefill, 2),
            "generate_tokens_a_second": round(new_tokens / generate, 2),
            "prefill_ratio": round(prefill / own[0], 3),
            "generate_ratio": round(generate / own[1], 3),
        }
        for name, (prefill, generate) in medians.items()
    ]
    return {"layers": layers, "prompt": prompt, "new_tokens": new_tokens, "threads": torch.get_num_threads(), "rows": rows}


def _difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """The median token's: in bf16 a few tokens are routed to another expert by rounding alone."""
    return ((got - want).norm(dim=-1) / want.norm(dim=-1)).median().item()


def _with_form(model: Any, name: str) -> Any:
    model.config._experts_implementation = name
    return model


def _generate(model: Any, ids: torch.Tensor, count: int) -> None:
    model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)


def text(found: dict[str, Any]) -> str:
    import io

    from rich.console import Console
    from rich.table import Table

    title = f"Qwen3.5-35B-A3B layers x {found['layers']}, bf16, prompt {found['prompt']}, {found['new_tokens']} new tokens"
    table = Table(title=f"{title}, {found['threads']} threads", title_justify="left")
    for column in ("form", "prefill tok/s", "(ratio)", "generate tok/s", "(ratio)"):
        table.add_column(column, justify="left" if column == "form" else "right")
    for row in found["rows"]:
        speeds = f"{row['prefill_tokens_a_second']:.1f}", f"{row['prefill_ratio']:.2f}", f"{row['generate_tokens_a_second']:.1f}"
        table.add_row(row["form"], *speeds, f"{row['generate_ratio']:.2f}")
    buffer = io.StringIO()
    Console(file=buffer, width=110, force_terminal=False).print(table)
    return buffer.getvalue()
