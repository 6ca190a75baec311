# SPDX-License-Identifier: Apache-2.0
"""Which families of models there are, as data. A new one is an entry here and a golden case."""

import dataclasses
from typing import Any

from detjax.models.config import Gating, NormPlacement
from detjax.models.family import (
    ROUTER_TRAINING,
    BiasRule,
    ExpertKeys,
    ExpertStack,
    Family,
    MtpLayout,
    RopeRule,
    WindowRule,
    Wrapper,
)

_SHARED = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,  # hidden_size / num_attention_heads
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Keys that every family maps, with the values of Mistral."""

_QWEN = _SHARED | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "bos_token_id": None,
    "eos_token_id": None,
}

_SHARED_EXPERT_KEYS = ExpertKeys(
    num_experts=("num_experts",),
    copies={"num_experts": ("num_local_experts",)},
    width="moe_intermediate_size",
    renormalise="norm_topk_prob",
    layers=True,
    shared_width="shared_expert_intermediate_size",
)
"""Of Qwen's mixtures with an expert that every token has."""

_QWEN_WINDOWS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_GLM = _SHARED | {
    "vocab_size": 151552,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-7,
    "bos_token_id": None,
    "eos_token_id": [151329, 151336, 151338],
    "attention_bias": True,
}
_OLMO = _SHARED | {
    "vocab_size": 50304,
    "intermediate_size": 11008,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": 50279,
    "attention_bias": False,
}
_GEMMA = _SHARED | {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
}
_GELU_TANH = "gelu_pytorch_tanh"
_GEMMA_CHECKED = {
    "attention_bias": (False,),
    "hidden_act": (_GELU_TANH,),
    "hidden_activation": (_GELU_TANH, None),
    "use_bidirectional_attention": (False, None),
}
_LLAVA_NAMES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
"""Names of a decoder's tensors beside those of parts for images, by newer and older releases."""

_LLAVA_SPARE = tuple(
    f"{model}{part}."
    for model in ("", "model.")
    for part in ("vision_tower", "multi_modal_projector")
)
_MISTRAL3 = Wrapper(
    architecture="Mistral3ForConditionalGeneration",
    model_type="mistral3",
    section="text_config",
    inert=frozenset(
        {"image_token_id", "image_token_index", "multimodal_projector_bias", "projector_hidden_act"}
        | {"spatial_merge_size", "vision_config", "vision_feature_layer"}
    ),
    names=_LLAVA_NAMES,
)
_NORMS_AFTER = {
    "post_self_attn_layernorm": "post_attention_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
"""Names of norms of results; detjax's are those of GLM-4."""

_NORMS_AROUND = _NORMS_AFTER | {"post_attention_layernorm": "pre_feedforward_layernorm"}


def _qwen3_5_wrapper(architecture: str, model_type: str) -> Wrapper:
    return Wrapper(
        architecture=architecture,
        model_type=model_type,
        section="text_config",
        inert=frozenset({"language_model_only", "vision_config"})
        | {f"{kind}_token_id" for kind in ("image", "video", "vision_start", "vision_end")},
        names={"model.language_model.": "model."},
    )


_QWEN3_5_MTP = MtpLayout(
    count="mtp_num_hidden_layers",
    prefix="mtp.",
    layer="layers.0.",
    names={
        "embed_norm": "pre_fc_norm_embedding",
        "hidden_norm": "pre_fc_norm_hidden",
        "join": "fc",
        "last_norm": "norm",
    },
    is_hidden_first=False,
    hands_normalised=True,
    checked={"mtp_use_dedicated_embeddings": (False,)},
)

# Qwen3.5 (dense, text): three layers of gated DeltaNet to one of attention with an output gate.
_QWEN3_5 = Family(
    name="qwen3_5_text",
    architectures=("Qwen3_5ForCausalLM",),
    defaults=_SHARED
    | {
        "vocab_size": 248320,
        "intermediate_size": 12288,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "bos_token_id": None,
        "eos_token_id": None,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
    qk_norm=True,
    gain_offset=1.0,
    partial_rotary=0.25,
    has_linear_attention=True,
    has_output_gate=True,
    fused={
        f"linear_attn.{joined}": tuple(f"linear_attn.{part}_{x}" for x in "qkv")
        for joined, part in (("in_proj_qkv", "in_proj"), ("conv1d", "conv1d"))
    },
    checked={
        "attention_bias": (False,),
        "attn_output_gate": (True,),
        "mamba_ssm_dtype": ("float32",),
        "mlp_only_layers": ([], None),
    },
    # Layers that predict further tokens, and see images: no text needs them.
    spare_tensors=("mtp.", "model.visual."),
    wrapper=_qwen3_5_wrapper("Qwen3_5ForConditionalGeneration", "qwen3_5"),
    inert=frozenset({"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"}),
    rope_inert=frozenset({"mrope_interleaved", "mrope_section"}),
    mtp=_QWEN3_5_MTP,
)

FAMILIES: tuple[Family, ...] = (
    # Llama (1, 2, 3, 3.1, 3.2) and what borrows its architecture.
    Family(
        name="llama",
        architectures=("LlamaForCausalLM",),
        defaults=_SHARED
        | {
            "intermediate_size": 11008,
            "num_key_value_heads": None,  # as many as query heads
            "max_position_embeddings": 2048,
            "attention_bias": False,
        },
        qkv_bias=BiasRule.AS_CONFIGURED,
        o_bias=BiasRule.AS_CONFIGURED,
        qk_norm=False,
        windows=WindowRule.NEVER,
        checked={"sliding_window": (None,), "use_sliding_window": (False,)},
    ),
    # Mistral 7B and Nemo: Llama with a sliding window over every layer, or none.
    Family(
        name="mistral",
        architectures=("MistralForCausalLM",),
        defaults=_SHARED | {"sliding_window": 4096},
        qkv_bias=BiasRule.NEVER,
        o_bias=BiasRule.NEVER,
        qk_norm=False,
        windows=WindowRule.EVERY_LAYER,
        checked={"attention_bias": (False,)},
        wrapper=_MISTRAL3,
        spare_tensors=_LLAVA_SPARE,
    ),
    # Ministral 3: Mistral whose queries are scaled by position.
    Family(
        name="ministral3",
        architectures=("Ministral3ForCausalLM",),
        defaults=_SHARED
        | {
            "vocab_size": 131072,
            "num_hidden_layers": 34,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
        },
        windows=WindowRule.EVERY_LAYER,
        default_rope={
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        rope_inert=frozenset({"max_position_embeddings"}),
        scales_queries=True,
        checked={"attention_bias": (False,)},
        wrapper=_MISTRAL3,
        spare_tensors=_LLAVA_SPARE,
    ),
    # Mixtral: Mistral whose every feed-forward layer is a mixture of experts.
    Family(
        name="mixtral",
        architectures=("MixtralForCausalLM",),
        defaults=_SHARED
        | {
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        qkv_bias=BiasRule.NEVER,
        o_bias=BiasRule.NEVER,
        qk_norm=False,
        windows=WindowRule.EVERY_LAYER,
        checked={"attention_bias": (False,)},
        inert=ROUTER_TRAINING,
        experts=ExpertKeys(
            num_experts=("num_local_experts",),
            width="intermediate_size",
            renormalise=None,
            layers=False,
        ),
    ),
    # Qwen2 and Qwen2.5: Llama with biases on q, k and v.
    Family(
        name="qwen2",
        architectures=("Qwen2ForCausalLM",),
        defaults=_QWEN | _QWEN_WINDOWS,
        qkv_bias=BiasRule.ALWAYS,
        o_bias=BiasRule.NEVER,
        qk_norm=False,
        windows=WindowRule.BY_LAYER,
    ),
    # MiMo 7B: Qwen2 with one more layer, which predicts a further token.
    Family(
        name="mimo",
        architectures=("MiMoForCausalLM",),
        defaults=_QWEN | _QWEN_WINDOWS,
        qkv_bias=BiasRule.ALWAYS,
        windows=WindowRule.BY_LAYER,
        checked={"attention_bias": (True,)},
        spare_tensors=("model.mtp_layers.",),
        inert=frozenset({"num_nextn_predict_layers"}),
        mtp=MtpLayout(
            count="num_nextn_predict_layers",
            prefix="model.mtp_layers.0.",
            layer="",
            names={
                "embed_norm": "token_layernorm",
                "hidden_norm": "hidden_layernorm",
                "join": "input_proj",
                "last_norm": "final_layernorm",
            },
            is_hidden_first=True,
            hands_normalised=False,
        ),
    ),
    # Qwen2 with mixtures of experts (Qwen1.5-MoE-A2.7B, 57B-A14B), and a shared expert with a gate.
    Family(
        name="qwen2_moe",
        architectures=("Qwen2MoeForCausalLM",),
        defaults=_QWEN
        | _QWEN_WINDOWS
        | {
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
        },
        qkv_bias=BiasRule.ALWAYS,
        windows=WindowRule.BY_LAYER,
        checked={"qkv_bias": (True,)},
        inert=ROUTER_TRAINING,
        experts=_SHARED_EXPERT_KEYS,
    ),
    # Qwen3 (dense): norms on the heads of q and k, no biases unless asked for.
    Family(
        name="qwen3",
        architectures=("Qwen3ForCausalLM",),
        defaults=_QWEN | _QWEN_WINDOWS | {"head_dim": 128, "attention_bias": False},
        qkv_bias=BiasRule.AS_CONFIGURED,
        o_bias=BiasRule.AS_CONFIGURED,
        qk_norm=True,
        windows=WindowRule.BY_LAYER,
    ),
    # Qwen3 with mixtures of experts (30B-A3B, 235B-A22B): attention as in Qwen3.
    Family(
        name="qwen3_moe",
        architectures=("Qwen3MoeForCausalLM",),
        defaults=_QWEN
        | {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_key_value_heads": 4,
            "attention_bias": False,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
        },
        qkv_bias=BiasRule.AS_CONFIGURED,
        o_bias=BiasRule.AS_CONFIGURED,
        qk_norm=True,
        windows=WindowRule.NEVER,
        checked={
            "qkv_bias": (False,),
            "shared_expert_intermediate_size": (0, None),
            "use_qk_norm": (True,),
            "use_sliding_window": (False,),
        },
        inert=ROUTER_TRAINING | {"max_window_layers", "sliding_window"},
        experts=ExpertKeys(
            num_experts=("num_experts", "num_local_experts"),  # the latter by transformers 5
            width="moe_intermediate_size",
            renormalise="norm_topk_prob",
            layers=True,
        ),
    ),
    # Granite 3 (dense): Llama with multipliers.
    Family(
        name="granite",
        architectures=("GraniteForCausalLM",),
        defaults=_SHARED
        | {
            "intermediate_size": 11008,
            "num_key_value_heads": None,
            "max_position_embeddings": 2048,
            "attention_bias": False,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
        qkv_bias=BiasRule.AS_CONFIGURED,
        o_bias=BiasRule.AS_CONFIGURED,
    ),
    # SmolLM3: Llama whose every fourth layer has no rotary embedding.
    Family(
        name="smollm3",
        architectures=("SmolLM3ForCausalLM",),
        defaults=_SHARED
        | {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "attention_bias": False,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
        },
        qkv_bias=BiasRule.AS_CONFIGURED,
        o_bias=BiasRule.AS_CONFIGURED,
        ropes=RopeRule.SOME_LAYERS,
        checked={
            "pretraining_tp": (1, 2, None),  # of its training, and read by nobody
            "sliding_window": (None,),
            "use_sliding_window": (False,),
        },
        inert=frozenset({"max_window_layers"}),
    ),
    # Phi-3, 3.5 and 4: joined projections, a share of channels rotated, longrope.
    Family(
        name="phi3",
        architectures=("Phi3ForCausalLM",),
        defaults=_SHARED
        | {
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_key_value_heads": None,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 32000,
            "sliding_window": None,
        },
        partial_rotary=1.0,
        windows=WindowRule.EVERY_LAYER,
        fused={
            "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
        },
        checked={
            "attention_bias": (False,),
            "full_attn_mod": (1,),
            "interpolate_factor": (1,),
            "lm_head_bias": (False,),
        },
        inert=frozenset({"embd_pdrop", "resid_pdrop"}),
    ),
    # Seed-OSS: Llama with biases on q, k and v, and heads wider than hidden_size.
    Family(
        name="seed_oss",
        architectures=("SeedOssForCausalLM",),
        defaults=_SHARED
        | {
            "vocab_size": 155136,
            "intermediate_size": 27648,
            "num_hidden_layers": 64,
            "num_attention_heads": 80,
            "head_dim": 128,
            "max_position_embeddings": 524288,
            "bos_token_id": 0,
            "attention_bias": True,
            "attention_out_bias": False,
        },
        qkv_bias=BiasRule.AS_CONFIGURED,
        o_bias=BiasRule.OUT_AS_CONFIGURED,
        inert=frozenset({"residual_dropout"}),
    ),
    # GLM-4 (0414): norms before and after, half of the channels rotated in pairs of neighbours.
    Family(
        name="glm4",
        architectures=("Glm4ForCausalLM",),
        defaults=_GLM,
        partial_rotary=0.5,
        qkv_bias=BiasRule.AS_CONFIGURED,
        norms=NormPlacement.BOTH,
        is_interleaved=True,
        fused={"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")},
    ),
    # GLM-4 (9B chat, its first form): GLM-4 without the norms after.
    Family(
        name="glm",
        architectures=("GlmForCausalLM",),
        defaults=_GLM,
        partial_rotary=0.5,
        qkv_bias=BiasRule.AS_CONFIGURED,
        is_interleaved=True,
        fused={"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")},
    ),
    # ERNIE 4.5 (dense): Llama with rotated pairs of neighbours.
    Family(
        name="ernie4_5",
        architectures=("Ernie4_5ForCausalLM",),
        defaults=_SHARED
        | {
            "vocab_size": 103424,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 18,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
        },
        is_interleaved=True,
        checked={"use_bias": (False, None)},
    ),
    # OLMo 2: norms after attention and feed-forward layer, and over all heads of q and of k.
    Family(
        name="olmo2",
        architectures=("Olmo2ForCausalLM",),
        defaults=_OLMO,
        qkv_bias=BiasRule.AS_CONFIGURED,
        o_bias=BiasRule.AS_CONFIGURED,
        norms=NormPlacement.AFTER,
        is_qk_norm_whole=True,
        tensor_names=_NORMS_AFTER,
    ),
    # OLMo 3: OLMo 2 with a window in three layers of four, which rotary scaling leaves alone.
    Family(
        name="olmo3",
        architectures=("Olmo3ForCausalLM",),
        defaults=_OLMO | {"rope_theta": 500000.0, "sliding_window": 4096},
        qkv_bias=BiasRule.AS_CONFIGURED,
        o_bias=BiasRule.AS_CONFIGURED,
        windows=WindowRule.BY_PATTERN,
        window_step=4,
        unread={"sliding_window_pattern": (4,)},
        ropes=RopeRule.BY_WINDOW,
        norms=NormPlacement.AFTER,
        is_qk_norm_whole=True,
        tensor_names=_NORMS_AFTER,
    ),
    # EXAONE 4: norms after, norms on the heads of q and k; layers without a window, if others have
    # one, are not rotated.
    Family(
        name="exaone4",
        architectures=("Exaone4ForCausalLM",),
        defaults=_SHARED
        | {
            "vocab_size": 102400,
            "intermediate_size": 16384,
            "num_key_value_heads": 32,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 0,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        qk_norm=True,
        windows=WindowRule.BY_PATTERN,
        ropes=RopeRule.WINDOWS_ALONE,
        norms=NormPlacement.AFTER,
        tensor_names=_NORMS_AFTER,
    ),
    # Gemma 2: windows in every other layer, norms before and after with gains 1 + w, soft caps.
    Family(
        name="gemma2",
        architectures=("Gemma2ForCausalLM",),
        defaults=_GEMMA
        | {
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        windows=WindowRule.BY_PATTERN,
        window_step=2,
        unread={"sliding_window_pattern": (2,)},
        norms=NormPlacement.BOTH,
        gating=Gating.GEGLU,
        gain_offset=1.0,
        scales_embedding=True,
        tensor_names=_NORMS_AROUND,
        checked=_GEMMA_CHECKED,
        inert=frozenset({"cache_implementation", "sliding_window_size"}),
    ),
    # Gemma 3 (text): Gemma 2 with norms on the heads of q and k and two rotary bases, no soft caps.
    Family(
        name="gemma3_text",
        architectures=("Gemma3ForCausalLM",),
        defaults=_GEMMA
        | {
            "vocab_size": 262208,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "sliding_window_pattern": 6,
            "final_logit_softcapping": None,
        },
        unread={"attn_logit_softcapping": (None,)},
        qk_norm=True,
        windows=WindowRule.BY_PATTERN,
        ropes=RopeRule.BY_WINDOW,
        norms=NormPlacement.BOTH,
        gating=Gating.GEGLU,
        gain_offset=1.0,
        scales_embedding=True,
        tensor_names=_NORMS_AROUND,
        checked=_GEMMA_CHECKED,
        inert=frozenset({"_sliding_window_pattern", "cache_implementation"}),
        wrapper=Wrapper(
            architecture="Gemma3ForConditionalGeneration",
            model_type="gemma3",
            section="text_config",
            inert=frozenset({"image_token_id", "mm_tokens_per_image", "vision_config"})
            | {f"{kind}_token_index" for kind in ("boi", "eoi", "image")},
            names=_LLAVA_NAMES,
        ),
        spare_tensors=_LLAVA_SPARE,
    ),
    _QWEN3_5,
    # Qwen3.5 with mixtures of experts (35B-A3B and larger, text): Qwen3.5, and a shared expert.
    dataclasses.replace(
        _QWEN3_5,
        name="qwen3_5_moe_text",
        architectures=("Qwen3_5MoeForCausalLM",),
        defaults={
            **_QWEN3_5.defaults,
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
        checked={**_QWEN3_5.checked, "norm_topk_prob": (True,)},
        inert=_QWEN3_5.inert | ROUTER_TRAINING,
        experts=ExpertKeys(
            num_experts=("num_experts",),
            copies={"num_experts": ("num_local_experts",)},
            width="moe_intermediate_size",
            renormalise=None,
            layers=False,
            shared_width="shared_expert_intermediate_size",
        ),
        stacked=ExpertStack.HALVES,
        wrapper=_qwen3_5_wrapper("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"),
    ),
    # Qwen3-Next (80B-A3B): Qwen3.5 with experts, its projections joined by heads of keys.
    dataclasses.replace(
        _QWEN3_5,
        name="qwen3_next",
        architectures=("Qwen3NextForCausalLM",),
        defaults={
            **_QWEN3_5.defaults,
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 48,
            "num_key_value_heads": 2,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
        },
        fused={
            "linear_attn.conv1d": tuple(f"linear_attn.conv1d_{x}" for x in "qkv"),
        },
        fused_by_head={
            "linear_attn.in_proj_qkvz": tuple(f"linear_attn.in_proj_{x}" for x in "qkvz"),
            "linear_attn.in_proj_ba": tuple(f"linear_attn.in_proj_{x}" for x in "ba"),
        },
        checked={"attention_bias": (False,), "use_sliding_window": (False,)},
        spare_tensors=("mtp.",),
        # Published files name no count: vLLM and SGLang take one head where nothing is said.
        mtp=dataclasses.replace(_QWEN3_5_MTP, count="num_nextn_predict_layers", checked={}),
        wrapper=None,
        inert=ROUTER_TRAINING | {"num_nextn_predict_layers"},
        rope_inert=frozenset(),
        experts=_SHARED_EXPERT_KEYS,
    ),
    # GLM-4.5 and GLM-4.5-Air: experts chosen by sigmoids, a shared one, dense layers first.
    Family(
        name="glm4_moe",
        architectures=("Glm4MoeForCausalLM",),
        defaults=_SHARED
        | {
            "vocab_size": 151552,
            "intermediate_size": 10944,
            "num_hidden_layers": 46,
            "num_attention_heads": 96,
            "rms_norm_eps": 1e-5,
            "bos_token_id": None,
            "eos_token_id": None,
            "attention_bias": False,
            "use_qk_norm": False,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "num_nextn_predict_layers": 1,
        },
        partial_rotary=0.5,
        qkv_bias=BiasRule.AS_CONFIGURED,
        checked={"n_group": (1,), "topk_group": (1,)},
        # A layer that predicts further tokens stands behind those of the decoder.
        spare_layers=("num_nextn_predict_layers", "num_mtp_layers"),
        mtp=MtpLayout(
            count="num_nextn_predict_layers",
            prefix="model.layers.{}.",
            layer="",
            names={
                "embed_norm": "enorm",
                "hidden_norm": "hnorm",
                "join": "eh_proj",
                "last_norm": "shared_head.norm",
            },
            is_hidden_first=False,
            hands_normalised=True,
            checked={"num_mtp_layers": (1,)},
            copies={
                "embed_tokens.weight": "model.embed_tokens.weight",
                "shared_head.head.weight": "lm_head.weight",
            },
        ),
        inert=ROUTER_TRAINING,
        experts=ExpertKeys(
            num_experts=("n_routed_experts", "num_local_experts"),
            copies={"n_routed_experts": ("num_experts",)},
            width="moe_intermediate_size",
            renormalise="norm_topk_prob",
            layers=False,
            num_shared="n_shared_experts",
            first_dense="first_k_dense_replace",
            sigmoid_scale="routed_scaling_factor",
        ),
    ),
    # gpt-oss: sinks, windows in every other layer, and mixtures of experts with biases and a clamp.
    Family(
        name="gpt_oss",
        architectures=("GptOssForCausalLM",),
        defaults=_SHARED
        | {
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "bos_token_id": None,
            "eos_token_id": None,
            "attention_bias": True,
            "sliding_window": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        qkv_bias=BiasRule.AS_CONFIGURED,
        o_bias=BiasRule.AS_CONFIGURED,
        windows=WindowRule.BY_PATTERN,
        window_step=2,
        unread={"sliding_window_pattern": (2,)},
        default_rope={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        has_sinks=True,
        stacked=ExpertStack.IN_TURN,
        # OpenAI's name of what rope_scaling has; transformers does not read it.
        inert=ROUTER_TRAINING | {"initial_context_length"},
        experts=ExpertKeys(
            num_experts=("num_local_experts", "num_experts"),
            copies={"num_experts_per_tok": ("experts_per_token",)},
            width="intermediate_size",
            renormalise=None,
            layers=False,
            clamp=("swiglu_alpha", "swiglu_limit"),
        ),
    ),
)


def supported_architectures() -> tuple[str, ...]:
    """Every value of `architectures` that can be loaded."""
    return tuple(name for family in FAMILIES for name in family.architectures)


def family_named(name: str) -> Family | None:
    """The family of a `ModelConfig`, by its name; None for one that is read from no file."""
    return next((family for family in FAMILIES if family.name == name), None)


def wrapped_families(architectures: Any) -> dict[str, tuple[Wrapper, Family]]:
    """Families that the text decoder of a model with other parts may have, by their names.

    The first is that of a decoder that does not say. Empty for a model without other parts.
    """
    return {
        family.name: (family.wrapper, family)
        for family in FAMILIES
        if family.wrapper is not None and architectures == [family.wrapper.architecture]
    }


def find_family(architectures: Any) -> Family:
    """The family that computes `architectures`, the list of one name in a `config.json`.

    Raises:
        ValueError: If it is not a list of one supported name; the message lists those that are.
    """
    for family in FAMILIES:
        for name in family.architectures:
            if architectures == [name]:
                return family
    wrappers = dict.fromkeys(f.wrapper.architecture for f in FAMILIES if f.wrapper is not None)
    others = [f"{name} (its text)" for name in wrappers]
    raise ValueError(
        f"architectures={architectures!r} is not supported; detjax loads one of "
        f"{', '.join([*supported_architectures(), *others])} (a list of one name in config.json)"
    )
