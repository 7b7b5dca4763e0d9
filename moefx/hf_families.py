"""What a Hugging Face config does not say of its family: the modeling files of transformers 5.24, as one table.

A family is a model_type without its "_text": a vision-language wrapper and its text config are one family. Several entries for one
family are its parts, each with expert sets of its own (encoder and decoder, text and vision experts).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moefx import hf_rules as rules
from moefx.hf_rules import Rule

EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k")
SHARED_COUNT = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")


@dataclass(frozen=True)
class Family:
    """One set of expert layers: where its sizes are and what its modeling file computes.

    act: the key of the activation's name, None where the modeling file fixes `kind`. limit: the swiglu limit of the config class.
    shared: "sigmoid" (gated), "plain" or None; its width is that of `shared_width` (the experts' where that is None) times the number
    in `shared_count`. shared_why_unfused holds unless the flag `shared_unfused_by` is off. latent: the key of the experts' input width
    where they do not read the hidden states. why_left_alone: the modeling file computes no sum of weighted experts that a kernel could
    take over. part: which of the family's expert sets this is.
    """

    layers: Rule = rules.every
    experts: tuple[str, ...] = EXPERTS
    top_k: tuple[str, ...] | int = TOP_K
    hidden: tuple[str, ...] = ("hidden_size",)
    width: tuple[str, ...] | int = ("moe_intermediate_size",)
    latent: str | None = None
    kind: str = "swiglu"
    act: str | None = "hidden_act"
    columns: str = "concat"
    clamp: str | None = None
    limit: float | None = None
    alpha: float = 1.0
    beta: float = 0.0
    bias: bool = False
    shared: str | None = None
    shared_width: str | None = None
    shared_count: tuple[str, ...] = ()
    shared_columns: str = "separate"
    shared_bias: str | None = None
    shared_clamped: bool = True
    shared_why_unfused: str | None = None
    shared_unfused_by: str | None = None
    form: str = "grouped_mm"
    why_left_alone: str | None = None
    part: str = ""


_D = Family()
_WIDE = Family(width=("intermediate_size",))
_STEPPED = Family(rules.every_nth())
_GATED = Family(shared="sigmoid", shared_width="shared_expert_intermediate_size")
_OWN = Family(shared="plain", shared_width="shared_expert_intermediate_size")
_COUNTED = Family(shared="plain", shared_count=SHARED_COUNT)
_GRANITE = replace(
    _WIDE,
    shared="plain",
    shared_width="shared_intermediate_size",
    shared_columns="concat",
    shared_why_unfused="the decoder layer adds the shared expert, outside the block of the experts",
)
_SCALED = "the routed output is scaled before the shared expert is added"
_BIASED = replace(_COUNTED, shared_bias="mlp_bias")
_CLAMPED = replace(_COUNTED, clamp="pre", limit=10.0, act=None)
_OAI = Family(width=("intermediate_size",), kind="swiglu_oai", act=None, clamp="pre", limit=7.0, alpha=1.702, beta=1.0)
_RELU = Family(hidden=("d_model",), kind="opaque", act=None, why_left_alone="experts drop the tokens above a capacity")


def _dense_first(default: int, *names: str, base: Family = _COUNTED) -> tuple[Family, ...]:
    return (replace(base, layers=rules.listed(rules.after(default, *names))),)


_FIRST = "first_k_dense_replace"
FAMILIES: dict[str, tuple[Family, ...]] = {
    **dict.fromkeys(("mixtral", "minimax", "minimax_m2", "olmoe", "flex_olmo", "phimoe", "granitemoe"), (_WIDE,)),
    **dict.fromkeys(("qwen3_moe", "qwen3_vl_moe", "qwen3_omni_moe", "qwen3_omni_moe_thinker"), (_STEPPED,)),
    **dict.fromkeys(("qwen2_moe", "qwen3_next", "qwen3_omni_moe_talker"), (replace(_GATED, layers=rules.every_nth()),)),
    **dict.fromkeys(("qwen3_5_moe", "qwen4_exp"), (_GATED,)),
    **dict.fromkeys(("granitemoe_swa", "granitemoehybrid", "granitemoeshared"), (_GRANITE,)),
    **dict.fromkeys(("kolibri1", "lara_mini"), (_OWN,)),
    **dict.fromkeys(("dots1", "mistral4"), (replace(_COUNTED, layers=rules.after(0, _FIRST)),)),
    "deepseek_v2": (replace(_BIASED, layers=rules.after(0, _FIRST)),),
    **dict.fromkeys(("glm4_moe", "glm4v_moe"), (replace(_COUNTED, layers=rules.after(1, _FIRST)),)),
    **dict.fromkeys(("deepseek_v3", "kimi_k2"), (replace(_COUNTED, layers=rules.after(3, _FIRST)),)),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), _dense_first(3, _FIRST)),
    **dict.fromkeys(("exaone_moe", "kimi_linear", "mistral_large4"), _dense_first(1, _FIRST)),
    **dict.fromkeys(("deepseek_ocr2", "unlimited_ocr"), _dense_first(1, _FIRST, base=_BIASED)),
    "glm4_moe_lite": _dense_first(1),
    "hy_v3": _dense_first(
        1, base=replace(_BIASED, shared_why_unfused="the shared expert is added in float32", shared_unfused_by="enable_moe_fp32_combine")
    ),
    **dict.fromkeys(("axk1", "axk2"), (replace(_COUNTED, layers=rules.listed(rules.by_frequency(1))),)),
    **dict.fromkeys(("hy_v4", "hy_v4_vl"), _dense_first(1, base=replace(_CLAMPED, shared_clamped=False))),
    "afmoe": (replace(_COUNTED, layers=rules.after(1, "num_dense_layers")),),
    "aria": (replace(_WIDE, act=None, shared="plain", shared_count=SHARED_COUNT, shared_bias="mlp_bias"),),
    "bailing_hybrid": _dense_first(2, _FIRST),
    "beam": _dense_first(3, base=_D),
    "cohere2_moe": _dense_first(0, _FIRST, base=replace(_COUNTED, width=("intermediate_size",))),
    "dbrx": (
        Family(
            experts=("ffn_config.moe_num_experts",),
            top_k=("ffn_config.moe_top_k",),
            hidden=("d_model", "hidden_size"),
            width=("ffn_config.ffn_hidden_size",),
            act="ffn_config.ffn_act_fn.name",
            form="loop",
        ),
    ),
    "deepseek_v4": (
        replace(
            _CLAMPED, layers=rules.every, shared_count=(), shared_bias="mlp_bias", width=("moe_intermediate_size", "intermediate_size")
        ),
    ),
    # Encoder and decoder share these weights.
    "diffusion_gemma": (Family(top_k=("top_k_experts",), kind="geglu_tanh", act="hidden_activation"),),
    "doge": (
        Family(
            rules.only_if("is_moe", rules.every), width=1, kind="opaque", act=None, why_left_alone="each expert is one row of an embedding"
        ),
    ),
    "dots3_note": (replace(_COUNTED, layers=rules.listed(rules.by_frequency(1)), shared_width="shared_experts_intermediate_size"),),
    "ernie4_5_moe": (replace(_COUNTED, layers=rules.ernie, shared_bias="use_bias"),),
    "ernie4_5_vl_moe": (
        replace(
            _COUNTED,
            layers=rules.listed(rules.after(1)),
            experts=("moe_num_experts.0", "moe_num_experts"),
            width=("moe_intermediate_size.0",),
            shared_bias="use_bias",
            shared_why_unfused="the vision experts use the shared expert too",
            part="text experts",
        ),
        Family(
            rules.listed(rules.after(1)),
            experts=("moe_num_experts.1", "moe_num_experts"),
            width=("moe_intermediate_size.1",),
            part="vision experts",
        ),
    ),
    "flint": (replace(_OWN, layers=rules.every_nth((0, 1))),),
    "gemma4": (
        Family(rules.only_if("enable_moe_block", rules.every), top_k=("top_k_experts",), kind="geglu_tanh", act="hidden_activation"),
    ),
    "glm5_next": _dense_first(3, base=_CLAMPED),
    "gpt_oss": (replace(_OAI, columns="interleaved", bias=True),),
    "hunyuan_v1_moe": (replace(_WIDE, shared="plain"),),
    "inkling": (
        replace(
            _COUNTED,
            layers=rules.listed(rules.after(0, "dense_mlp_idx")),
            shared_why_unfused="the router gives each shared expert a weight of its own",
        ),
    ),
    **dict.fromkeys(("inkling2", "inkling2_loop"), (Family(kind="opaque", act=None),)),
    "jamba": (replace(_WIDE, layers=rules.jamba),),
    "jetmoe": (
        replace(_WIDE, act="activation_function", why_left_alone="tokens are split among the experts by counts read back to the host"),
    ),
    "laguna": _dense_first(1, base=replace(_OWN, shared_why_unfused=_SCALED)),
    "lfm2_moe": (Family(rules.after(2, "num_dense_layers"), act=None),),
    "llama4": (
        replace(
            _WIDE,
            layers=rules.llama4,
            shared="plain",
            why_left_alone="router weights multiply the experts' input, not their output",
        ),
    ),
    "longcat_flash": (
        Family(
            lambda keys: range(int(keys.need("num_layers"))),
            width=("expert_ffn_hidden_size", "moe_intermediate_size"),
            why_left_alone="some of the experts the router picks from only hand their input on",
        ),
    ),
    "mellum": _dense_first(0, base=_D),
    "mimo_v2_flash": _dense_first(1, base=_D),
    "minimax_m3_vl": (
        replace(
            _OAI,
            layers=rules.listed(rules.minimax_m3),
            shared="plain",
            shared_width="shared_intermediate_size",
            shared_columns="concat",
            shared_why_unfused=_SCALED,
        ),
    ),
    "muse_spark": (
        Family(
            rules.listed(rules.every),
            hidden=("moe_hidden_size",),
            why_left_alone="each expert's output is normalised before it is weighted",
        ),
    ),
    "nemotron_h": (
        Family(
            rules.nemotron,
            latent="moe_latent_size",
            kind="relu2",
            act="mlp_hidden_act",
            shared="plain",
            shared_width="moe_shared_expert_intermediate_size",
            shared_bias="mlp_bias",
        ),
    ),
    "nllb-moe": tuple(
        replace(_RELU, layers=rules.nllb(side), width=(f"{side}_ffn_dim",), top_k=2, bias=True, part=side)
        for side in ("encoder", "decoder")
    ),
    "openai_privacy_filter": (replace(_OAI, bias=True),),
    "sarvam_mla": (replace(_COUNTED, layers=rules.after(1, _FIRST)),),
    "sarvam_moe": (replace(_COUNTED, layers=rules.after(1, _FIRST)),),
    "solar_open": (_COUNTED,),
    "step3p7": (
        replace(
            _D,
            layers=rules.listed(rules.step3),
            clamp="post",
            shared="plain",
            shared_width="share_expert_dim",
            shared_why_unfused=_SCALED,
            shared_bias="mlp_bias",
            form="loop",
        ),
    ),
    "switch_transformers": tuple(
        replace(_RELU, layers=rules.switch(side, depth), width=("d_ff",), top_k=1, part=side)
        for side, depth in (("encoder", "num_layers"), ("decoder", "num_decoder_layers"))
    ),
    "zaya": (_D,),
}
FAMILIES["step3p5"] = FAMILIES["step3p7"]
