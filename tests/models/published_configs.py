# SPDX-License-Identifier: Apache-2.0
"""The `config.json` of much used models of the supported families, with every key that is in it.

Written down from what is published; of sizes and keys alone, so no weight is needed.
"""

from typing import Any

Config = dict[str, Any]


def _config(architecture: str, model_type: str, sizes: tuple[int, ...], **keys: Any) -> Config:
    """`sizes`: vocabulary, width, gated channels, layers, heads, heads of keys, context."""
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "max_position_embeddings",
    )  # fmt: skip
    common = {
        "architectures": [architecture], "model_type": model_type, "hidden_act": "silu",
        "initializer_range": 0.02, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.40.0", "use_cache": True,
    }  # fmt: skip
    return common | dict(zip(names, sizes, strict=True)) | keys


def llama(*sizes: int, **keys: Any) -> Config:
    more = {"bos_token_id": 1, "eos_token_id": 2, "pretraining_tp": 1, "rope_scaling": None}
    return _config("LlamaForCausalLM", "llama", sizes, **more | keys)


LLAMA3_KEYS: Config = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "mlp_bias": False, "rope_theta": 500000.0,
}  # fmt: skip
LLAMA31_ROPE = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3",
}  # fmt: skip


def llama31(*sizes: int, factor: float = 8.0, **keys: Any) -> Config:
    rope = LLAMA31_ROPE | {"factor": factor}
    return llama(128256, *sizes, 131072, **LLAMA3_KEYS | {"rope_scaling": rope} | keys)


def smollm2(*sizes: int, **keys: Any) -> Config:
    more = {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": 2, "rope_interleaved": False, "rope_theta": 100000, "is_llama_config": True,
        "tie_word_embeddings": True, "mlp_bias": False,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    }  # fmt: skip
    return llama(49152, *sizes, 8192, **more | keys)


def mistral(*sizes: int, **keys: Any) -> Config:
    more = {"bos_token_id": 1, "eos_token_id": 2, "sliding_window": None}
    return _config("MistralForCausalLM", "mistral", sizes, **more | keys)


def mixtral(*sizes: int, **keys: Any) -> Config:
    more = {
        "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "num_experts_per_tok": 2,
        "num_local_experts": 8, "output_router_logits": False, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02, "sliding_window": None,
    }  # fmt: skip
    return _config("MixtralForCausalLM", "mixtral", sizes, **more | keys)


def mimo(*sizes: int, **keys: Any) -> Config:
    more = {
        "attention_bias": True, "attention_dropout": 0.0, "head_dim": 128, "max_window_layers": 32,
        "num_nextn_predict_layers": 1, "rope_theta": 640000, "sliding_window": 32768,
        "use_mrope": False, "use_sliding_window": False,
        "auto_map": {"AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM"},
    }  # fmt: skip
    return _config("MiMoForCausalLM", "mimo", sizes, **more | keys)


def qwen2(*sizes: int, **keys: Any) -> Config:
    more = {
        "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
        "max_window_layers": sizes[3], "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "sliding_window": 131072, "use_sliding_window": False,
    }  # fmt: skip
    return _config("Qwen2ForCausalLM", "qwen2", sizes, **more | keys)


def qwen3(*sizes: int, **keys: Any) -> Config:
    more = {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151645, "head_dim": 128, "max_window_layers": sizes[2],
        "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
        "use_sliding_window": False,
    }  # fmt: skip
    return _config("Qwen3ForCausalLM", "qwen3", (151936, *sizes), **more | keys)


def qwen3_moe(*sizes: int, **keys: Any) -> Config:
    more = {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
        "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
        "max_window_layers": sizes[2], "mlp_only_layers": [], "moe_intermediate_size": 768,
        "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8,
        "output_router_logits": False, "rms_norm_eps": 1e-6, "rope_scaling": None,
        "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
        "use_sliding_window": False,
    }  # fmt: skip
    return _config("Qwen3MoeForCausalLM", "qwen3_moe", (151936, *sizes), **more | keys)


def granite(*sizes: int, **keys: Any) -> Config:
    more = {
        "attention_bias": False, "attention_dropout": 0.1, "attention_multiplier": 0.0078125,
        "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0, "logits_scaling": 16.0,
        "mlp_bias": False, "pad_token_id": 0, "residual_multiplier": 0.22, "rope_scaling": None,
        "rope_theta": 10000000.0, "tie_word_embeddings": True,
    }  # fmt: skip
    return _config("GraniteForCausalLM", "granite", sizes, **more | keys)


def phi3(*sizes: int, **keys: Any) -> Config:
    more = {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "embd_pdrop": 0.0,
        "eos_token_id": 32000, "original_max_position_embeddings": 4096, "pad_token_id": 32000,
        "resid_pdrop": 0.0, "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 262144,
        "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
    }  # fmt: skip
    return _config("Phi3ForCausalLM", "phi3", sizes, **more | keys)


def longrope(num_pairs: int) -> Config:
    """Factors as those of Phi: near 1 for short texts, up to 60 for long ones."""
    short = [round(1 + i / 20, 2) for i in range(num_pairs)]
    long = [round(1 + i * 1.2, 2) for i in range(num_pairs)]
    return {"type": "longrope", "short_factor": short, "long_factor": long}


def gemma(architecture: str, model_type: str, *sizes: int, **keys: Any) -> Config:
    more = {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2,
        "cache_implementation": "hybrid", "eos_token_id": 1, "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    }  # fmt: skip
    return _config(architecture, model_type, sizes, **more | keys)


def mixed(num_layers: int, step: int) -> list[str]:
    """Windows in all layers but each `step`-th."""
    kinds = "sliding_attention", "full_attention"
    return [kinds[(i + 1) % step == 0] for i in range(num_layers)]


GEMMA2 = {
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "rope_theta": 10000.0,
    "sliding_window": 4096, "sliding_window_size": 4096,
}  # fmt: skip
GEMMA3 = {
    "attn_logit_softcapping": None, "final_logit_softcapping": None, "rope_theta": 1000000,
    "rope_local_base_freq": 10000, "rope_scaling": None, "sliding_window": 512,
    "sliding_window_pattern": 6, "eos_token_id": [1, 106],
}  # fmt: skip
PHI4_MINI = {
    "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False,
    "partial_rotary_factor": 0.75, "bos_token_id": 199999, "eos_token_id": 199999,
    "tie_word_embeddings": True,
}  # fmt: skip
SMOLLM3: Config = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": 128012, "layer_types": ["full_attention"] * 36, "max_window_layers": 28,
    "mlp_bias": False, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9,
    "pad_token_id": 128004, "pretraining_tp": 2, "rms_norm_eps": 1e-6, "rope_scaling": None,
    "rope_theta": 5000000.0, "sliding_window": None, "tie_word_embeddings": True,
    "use_sliding_window": False,
}  # fmt: skip
SEED_OSS: Config = {
    "attention_bias": True, "attention_dropout": 0.1, "attention_out_bias": False,
    "bos_token_id": 0, "eos_token_id": 2, "head_dim": 128, "mlp_bias": False, "pad_token_id": 1,
    "residual_dropout": 0.1, "rms_norm_eps": 1e-6, "rope_scaling": {"rope_type": "default"},
    "rope_theta": 10000000.0,
}  # fmt: skip
GLM4: Config = {
    "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128, "pad_token_id": 151329, "partial_rotary_factor": 0.5, "rope_theta": 10000.0,
}  # fmt: skip
OLMO2: Config = {
    "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": 100257,
    "pad_token_id": 100277, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 500000,
}  # fmt: skip
OLMO3: Config = OLMO2 | {
    "layer_types": mixed(32, 4), "sliding_window": 4096,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
        "original_max_position_embeddings": 8192, "rope_type": "yarn",
    },
}  # fmt: skip
GPT_OSS: Config = {
    "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "initial_context_length": 4096,
    "num_experts_per_tok": 4, "num_local_experts": 32, "output_router_logits": False,
    "pad_token_id": 199999, "rope_theta": 150000, "router_aux_loss_coef": 0.9,
    "sliding_window": 128, "swiglu_limit": 7.0,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
        "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False,
    },
}  # fmt: skip
EXAONE4: Config = {
    "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 361, "head_dim": 128,
    "layer_types": mixed(64, 4), "pad_token_id": 0, "rope_theta": 1000000, "sliding_window": 4096,
    "sliding_window_pattern": "LLLG", "rope_scaling": LLAMA31_ROPE | {"factor": 16.0},
}  # fmt: skip

YARN_QWEN = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
YARN_QWEN3 = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
YARN_CODE = {
    "AutoConfig": "configuration_llama.LlamaConfig",
    "AutoModelForCausalLM": "modeling_llama_yarn.LlamaForCausalLM",
}
CODER = {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True}

FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
       "modules_to_not_convert": ["lm_head"], "weight_block_size": [128, 128]}  # fmt: skip
AWQ = {"bits": 4, "group_size": 128, "modules_to_not_convert": None, "quant_method": "awq",
       "version": "gemm", "zero_point": True}  # fmt: skip
_OF_TENSORS = {
    "block_structure": None, "dynamic": False, "group_size": None, "num_bits": 8,
    "observer": "minmax", "observer_kwargs": {}, "strategy": "channel", "symmetric": True,
    "type": "float",
}  # fmt: skip


def compressed_tensors(format_: str, weights: Config, activations: Config | None) -> Config:
    group = {"input_activations": activations, "output_activations": None, "targets": ["Linear"],
             "weights": _OF_TENSORS | weights}  # fmt: skip
    return {
        "config_groups": {"group_0": group}, "format": format_, "global_compression_ratio": 1.2,
        "ignore": ["lm_head"], "kv_cache_scheme": None, "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }  # fmt: skip


W4A16 = compressed_tensors(
    "pack-quantized",
    {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "actorder": "weight"},
    None,
)
FP8_DYNAMIC = compressed_tensors(
    "float-quantized", {}, _OF_TENSORS | {"dynamic": True, "strategy": "token", "observer": None}
)
MINISTRAL3_ROPE: Config = {
    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
    "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0,
    "rope_type": "yarn", "type": "yarn",
}  # fmt: skip
STATIC_FP8: Config = {
    "activation_scheme": "static", "dequantize": False, "quant_method": "fp8",
    "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    "weight_block_size": None,
}  # fmt: skip
OF_WHOLE = ("architectures", "torch_dtype", "transformers_version")


def ministral3(*sizes: int, **keys: Any) -> Config:
    more = {"attention_dropout": 0.0, "head_dim": 128, "rope_parameters": MINISTRAL3_ROPE}
    more |= {"sliding_window": None, "bos_token_id": 1, "eos_token_id": 2}
    return _config("Ministral3ForCausalLM", "ministral3", sizes, **more | keys)


def mistral3(text: Config, **keys: Any) -> Config:
    """Inside a model that sees images."""
    return {
        "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3",
        "image_token_index": 10, "multimodal_projector_bias": False, "spatial_merge_size": 2,
        "projector_hidden_act": "gelu", "vision_feature_layer": -1, "dtype": "bfloat16",
        "transformers_version": "5.0.0.dev0", "vision_config": {"model_type": "pixtral"},
        "text_config": {key: x for key, x in text.items() if key not in OF_WHOLE},
    } | keys  # fmt: skip


def gemma3_wrapped(**text: Any) -> Config:
    more: Config = {"model_type": "gemma3_text", "sliding_window": 1024}
    return {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
        "boi_token_index": 255999, "eoi_token_index": 256000, "image_token_index": 262144,
        "eos_token_id": [1, 106], "initializer_range": 0.02, "mm_tokens_per_image": 256,
        "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
        "vision_config": {"model_type": "siglip_vision_model"},
        "text_config": more | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}} | text,
    }  # fmt: skip


GLM45: Config = {
    "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": [151329, 151336, 151338],
    "pad_token_id": 151329, "head_dim": 128, "partial_rotary_factor": 0.5, "rope_scaling": None,
    "rope_theta": 1000000, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_experts_per_tok": 8, "num_nextn_predict_layers": 1,
}  # fmt: skip
GLM45_AIR: Config = GLM45 | {
    "n_routed_experts": 128, "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0, "use_qk_norm": False,
}  # fmt: skip
GLM45_LARGE: Config = GLM45 | {
    "n_routed_experts": 160, "moe_intermediate_size": 1536, "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5, "use_qk_norm": True,
}  # fmt: skip
QWEN3_NEXT: Config = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "decoder_sparse_step": 1, "full_attention_interval": 4,
    "head_dim": 256, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
    "mlp_only_layers": [], "moe_intermediate_size": 512, "norm_topk_prob": True,
    "num_experts": 512, "num_experts_per_tok": 10, "output_router_logits": False,
    "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6, "rope_scaling": None,
    "rope_theta": 10000000, "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512, "use_sliding_window": False,
}  # fmt: skip


def glm45(*sizes: int, **keys: Any) -> Config:
    return _config("Glm4MoeForCausalLM", "glm4_moe", sizes, **keys)


LOADED: dict[str, tuple[Config, int]] = {
    "Llama-2-7b-chat": (llama(32000, 4096, 11008, 32, 32, 32, 4096), 4096),
    "Llama-2-13b": (llama(32000, 5120, 13824, 40, 40, 40, 4096), 4096),
    "Llama-2-70b": (llama(32000, 8192, 28672, 80, 64, 8, 4096), 4096),
    "CodeLlama-7b": (llama(32016, 4096, 11008, 32, 32, 32, 16384, rope_theta=1000000), 16384),
    "Meta-Llama-3-8B": (llama(128256, 4096, 14336, 32, 32, 8, 8192, **LLAMA3_KEYS), 8192),
    "Llama-3.1-8B-Instruct": (llama31(4096, 14336, 32, 32, 8), 131072),
    "Llama-3.1-70B-Instruct": (llama31(8192, 28672, 80, 64, 8), 131072),
    "Llama-3.1-405B": (llama31(16384, 53248, 126, 128, 8), 131072),
    "Llama-3.2-1B-Instruct": (
        llama31(2048, 8192, 16, 32, 8, factor=32.0, head_dim=64, tie_word_embeddings=True), 131072),
    "Llama-3.2-3B-Instruct": (
        llama31(3072, 8192, 28, 24, 8, factor=32.0, head_dim=128, tie_word_embeddings=True),
        131072),
    "Llama-3.3-70B-Instruct": (llama31(8192, 28672, 80, 64, 8), 131072),
    "Hermes-3-Llama-3.1-8B": (llama31(4096, 14336, 32, 32, 8, eos_token_id=128040), 131072),
    "Llama-3.1-Tulu-3-8B": (llama31(4096, 14336, 32, 32, 8, vocab_size=128264), 131072),
    "Llama-3.1-Nemotron-70B": (llama31(8192, 28672, 80, 64, 8), 131072),
    "DeepSeek-R1-Distill-Llama-8B": (llama31(4096, 14336, 32, 32, 8, eos_token_id=128001), 131072),
    "DeepSeek-R1-Distill-Llama-70B": (llama31(8192, 28672, 80, 64, 8, eos_token_id=128001),
                                      131072),
    "unsloth-Llama-3.2-1B": (
        llama31(2048, 8192, 16, 32, 8, factor=32.0, unsloth_fixed=True, pad_token_id=128004,
                unsloth_version="2024.9", neftune_noise_alpha=5), 131072),
    "TinyLlama-1.1B-Chat": (llama(32000, 2048, 5632, 22, 32, 4, 2048), 2048),
    "vicuna-7b-v1.5": (
        llama(32000, 4096, 11008, 32, 32, 32, 4096, _name_or_path="vicuna", pad_token_id=0), 4096),
    "vicuna-7b-v1.5-16k": (
        llama(32000, 4096, 11008, 32, 32, 32, 4096, max_sequence_length=16384,
              rope_scaling={"factor": 4.0, "type": "linear"}), 4096),
    "open_llama_3b": (llama(32000, 3200, 8640, 26, 32, 32, 2048, rms_norm_eps=1e-6), 2048),
    "SmolLM-135M": (
        llama(49152, 576, 1536, 30, 9, 3, 2048, tie_word_embeddings=True, attention_bias=False,
              initializer_range=1 / 24, rope_theta=10000.0), 2048),
    "SmolLM2-135M-Instruct": (smollm2(576, 1536, 30, 9, 3), 8192),
    "SmolLM2-360M-Instruct": (smollm2(960, 2560, 32, 15, 5), 8192),
    "SmolLM2-1.7B-Instruct": (smollm2(2048, 8192, 24, 32, 32, rope_theta=130000), 8192),
    "Yi-34B": (llama(64000, 7168, 20480, 60, 56, 8, 4096, rope_theta=5000000.0, pad_token_id=0),
               4096),
    "Yi-1.5-9B-Chat": (llama(64000, 4096, 11008, 48, 32, 4, 4096, rope_theta=5000000.0), 4096),
    "SOLAR-10.7B": (llama(32000, 4096, 14336, 48, 32, 8, 4096, rope_theta=10000.0), 4096),
    "deepseek-llm-7b-chat": (
        llama(102400, 4096, 11008, 30, 32, 32, 4096, bos_token_id=100000, eos_token_id=100001),
        4096),
    "deepseek-coder-6.7b": (
        llama(32256, 4096, 11008, 32, 32, 32, 16384, bos_token_id=32013, eos_token_id=32021,
              rope_scaling={"factor": 4.0, "type": "linear"}, rope_theta=100000), 16384),
    "Falcon3-7B-Instruct": (
        llama(131072, 3072, 23040, 28, 12, 4, 32768, head_dim=256, rope_theta=1000042,
              bos_token_id=11, eos_token_id=11), 32768),
    "granite-7b-base": (llama(32008, 4096, 11008, 32, 32, 32, 2048), 2048),
    "EuroLLM-9B": (llama(128000, 4096, 12288, 42, 32, 8, 4096), 4096),
    "open_llama_7b_32K": (
        llama(32000, 4096, 11008, 32, 32, 32, 32768, rope_scaling={"factor": 8.0, "type": "linear"},
              auto_map={"AutoModelForCausalLM": "modeling_flash_llama.LlamaForCausalLM"}), 32768),
    "Yarn-Llama-2-7b-64k": (
        llama(32000, 4096, 11008, 32, 32, 32, 4096, auto_map=YARN_CODE,
              rope_scaling={"factor": 16.0, "original_max_position_embeddings": 4096,
                            "type": "yarn", "finetuned": True}), 65536),
    "Yarn-Mistral-7b-128k": (
        mistral(32000, 4096, 14336, 32, 32, 8, 32768, max_sequence_length=131072,
                auto_map=YARN_CODE, sliding_window=131072, rope_theta=10000.0,
                rope_scaling={"factor": 16.0, "original_max_position_embeddings": 8192,
                              "type": "yarn", "finetuned": True}), 131072),
    "Mistral-7B-v0.1": (
        mistral(32000, 4096, 14336, 32, 32, 8, 32768, sliding_window=4096, rope_theta=10000.0),
        32768),
    "Mistral-7B-Instruct-v0.2": (
        mistral(32000, 4096, 14336, 32, 32, 8, 32768, rope_theta=1000000.0, attention_dropout=0.0),
        32768),
    "Mistral-7B-Instruct-v0.3": (
        mistral(32768, 4096, 14336, 32, 32, 8, 32768, rope_theta=1000000.0), 32768),
    "Mistral-Nemo-Instruct-2407": (
        mistral(131072, 5120, 14336, 40, 32, 8, 1024000, head_dim=128, rope_theta=1000000.0),
        1024000),
    "Mistral-Small-24B-Instruct-2501": (
        mistral(131072, 5120, 32768, 40, 32, 8, 32768, head_dim=128, rope_theta=100000000.0),
        32768),
    "Ministral-8B-Instruct-2410": (
        mistral(131072, 4096, 12288, 36, 32, 8, 32768, head_dim=128, sliding_window=32768,
                rope_theta=100000000.0), 32768),
    "zephyr-7b-beta": (
        mistral(32000, 4096, 14336, 32, 32, 8, 32768, sliding_window=4096, pad_token_id=2), 32768),
    "openchat-3.5": (
        mistral(32002, 4096, 14336, 32, 32, 8, 8192, sliding_window=4096, eos_token_id=32000),
        8192),
    "Mixtral-8x7B-Instruct": (mixtral(32000, 4096, 14336, 32, 32, 8, 32768), 32768),
    "Mixtral-8x22B-Instruct": (
        mixtral(32768, 6144, 16384, 56, 48, 8, 65536, router_jitter_noise=0.0), 65536),
    "Qwen2-0.5B-Instruct": (
        qwen2(151936, 896, 4864, 24, 14, 2, 32768, tie_word_embeddings=True), 32768),
    "Qwen2-72B-Instruct": (qwen2(152064, 8192, 29568, 80, 64, 8, 32768), 32768),
    "Qwen2.5-0.5B-Instruct": (
        qwen2(151936, 896, 4864, 24, 14, 2, 32768, tie_word_embeddings=True, sliding_window=32768),
        32768),
    "Qwen2.5-1.5B-Instruct": (
        qwen2(151936, 1536, 8960, 28, 12, 2, 32768, tie_word_embeddings=True, use_mrope=False),
        32768),
    "Qwen2.5-7B-Instruct": (qwen2(152064, 3584, 18944, 28, 28, 4, 32768), 32768),
    "Qwen2.5-7B-Instruct, yarn": (
        qwen2(152064, 3584, 18944, 28, 28, 4, 32768, rope_scaling=YARN_QWEN), 131072),
    "Qwen2.5-Coder-32B-Instruct": (
        qwen2(152064, 5120, 27648, 64, 40, 8, 32768, max_window_layers=70), 32768),
    "Qwen2.5-72B-Instruct": (
        qwen2(152064, 8192, 29568, 80, 64, 8, 32768, max_window_layers=70), 32768),
    "QwQ-32B": (
        qwen2(152064, 5120, 27648, 64, 40, 8, 40960, sliding_window=32768, rope_scaling=None),
        40960),
    "MiMo-7B-RL": (mimo(151680, 4096, 11008, 36, 32, 8, 32768), 32768),
    "DeepSeek-R1-Distill-Qwen-7B": (
        qwen2(152064, 3584, 18944, 28, 28, 4, 131072, use_mrope=False, rope_theta=10000,
              sliding_window=4096), 131072),
    "Qwen3-0.6B": (qwen3(1024, 3072, 28, 16, 8, 40960, tie_word_embeddings=True), 40960),
    "Qwen3-8B": (qwen3(4096, 12288, 36, 32, 8, 40960), 40960),
    "Qwen3-8B, yarn": (qwen3(4096, 12288, 36, 32, 8, 40960, rope_scaling=YARN_QWEN3), 131072),
    "Qwen3-32B": (qwen3(5120, 25600, 64, 64, 8, 40960), 40960),
    "Qwen3-4B-Instruct-2507": (
        qwen3(2560, 9728, 36, 32, 8, 262144, rope_theta=5000000, tie_word_embeddings=True), 262144),
    "Qwen3-Embedding-8B": (qwen3(4096, 12288, 36, 32, 8, 40960, vocab_size=151665), 40960),
    "Qwen3-30B-A3B": (qwen3_moe(2048, 6144, 48, 32, 4, 40960), 40960),
    "Qwen3-30B-A3B-Instruct-2507": (
        qwen3_moe(2048, 6144, 48, 32, 4, 262144, rope_theta=10000000), 262144),
    "Qwen3-Coder-30B-A3B-Instruct": (
        qwen3_moe(2048, 6144, 48, 32, 4, 262144, rope_theta=10000000, max_window_layers=28,
                  **CODER), 262144),
    "Qwen3-235B-A22B": (
        qwen3_moe(4096, 12288, 94, 64, 4, 40960, moe_intermediate_size=1536), 40960),
    "Qwen3-8B-FP8": (qwen3(4096, 12288, 36, 32, 8, 40960, quantization_config=FP8), 40960),
    "Qwen2.5-7B-Instruct-AWQ": (
        qwen2(152064, 3584, 18944, 28, 28, 4, 32768, quantization_config=AWQ), 32768),
    "Llama-3.1-8B-Instruct-quantized.w4a16": (
        llama(128256, 4096, 14336, 32, 32, 8, 131072, quantization_config=W4A16), 131072),
    "Llama-3.1-8B-Instruct-FP8-dynamic": (
        llama(128256, 4096, 14336, 32, 32, 8, 131072, quantization_config=FP8_DYNAMIC), 131072),
    "granite-3.1-8b-instruct": (granite(49155, 4096, 12800, 40, 32, 8, 131072), 131072),
    "granite-3.1-2b-instruct": (
        granite(49155, 2048, 8192, 40, 32, 8, 131072, attention_multiplier=0.015625,
                logits_scaling=8.0), 131072),
    "SmolLM3-3B": (
        _config("SmolLM3ForCausalLM", "smollm3", (128256, 2048, 11008, 36, 16, 4, 65536),
                **SMOLLM3), 65536),
    "Phi-3-mini-4k-instruct": (
        phi3(32064, 3072, 8192, 32, 32, 32, 4096, sliding_window=2047), 4096),
    "Phi-3.5-mini-instruct": (
        phi3(32064, 3072, 8192, 32, 32, 32, 131072, rope_scaling=longrope(48)), 4096),
    "Phi-4-mini-instruct": (
        phi3(200064, 3072, 8192, 32, 24, 8, 131072, rope_scaling=longrope(48), **PHI4_MINI), 4096),
    "phi-4": (
        phi3(100352, 5120, 17920, 40, 40, 10, 16384, rope_theta=250000, sliding_window=None,
             original_max_position_embeddings=16384, bos_token_id=100257, eos_token_id=100265),
        16384),
    "Seed-OSS-36B-Instruct": (
        _config("SeedOssForCausalLM", "seed_oss", (155136, 5120, 27648, 64, 80, 8, 524288),
                **SEED_OSS), 524288),
    "GLM-4-9B-0414": (
        _config("Glm4ForCausalLM", "glm4", (151552, 4096, 13696, 40, 32, 2, 32768), **GLM4), 32768),
    "GLM-4.5-Air": (glm45(151552, 4096, 10944, 46, 96, 8, 131072, **GLM45_AIR), 131072),
    "GLM-4.5": (glm45(151552, 5120, 12288, 92, 96, 8, 131072, **GLM45_LARGE), 131072),
    "Qwen3-Next-80B-A3B-Instruct": (
        _config("Qwen3NextForCausalLM", "qwen3_next", (151936, 2048, 5120, 48, 16, 2, 262144),
                **QWEN3_NEXT), 262144),
    "OLMo-2-1124-7B": (
        _config("Olmo2ForCausalLM", "olmo2", (100352, 4096, 11008, 32, 32, 32, 4096), **OLMO2),
        4096),
    "Olmo-3-7B": (
        _config("Olmo3ForCausalLM", "olmo3", (100278, 4096, 11008, 32, 32, 32, 65536), **OLMO3),
        65536),
    "EXAONE-4.0-32B": (
        _config("Exaone4ForCausalLM", "exaone4", (102400, 5120, 27392, 64, 40, 8, 131072),
                **EXAONE4), 131072),
    "gpt-oss-20b": (
        _config("GptOssForCausalLM", "gpt_oss", (201088, 2880, 2880, 24, 64, 8, 131072),
                layer_types=mixed(24, 2), **GPT_OSS), 131072),
    "gpt-oss-120b": (
        _config("GptOssForCausalLM", "gpt_oss", (201088, 2880, 2880, 36, 64, 8, 131072),
                layer_types=mixed(36, 2), **GPT_OSS | {"num_local_experts": 128}), 131072),
    "gemma-2-9b-it": (
        gemma("Gemma2ForCausalLM", "gemma2", 256000, 3584, 14336, 42, 16, 8, 8192, **GEMMA2), 8192),
    "gemma-3-1b-it": (
        gemma("Gemma3ForCausalLM", "gemma3_text", 262144, 1152, 6912, 26, 4, 1, 32768, **GEMMA3),
        32768),
    "gemma-3-12b-it": (
        gemma3_wrapped(num_hidden_layers=48, hidden_size=3840, intermediate_size=15360,
                       num_attention_heads=16, num_key_value_heads=8), 131072),
    "Mistral-Small-3.1-24B-Instruct-2503": (
        mistral3(mistral(131072, 5120, 32768, 40, 32, 8, 131072, head_dim=128,
                         rope_theta=1000000000.0)), 131072),
    "Ministral-3-8B-Instruct-2512": (
        mistral3(ministral3(131072, 4096, 14336, 34, 32, 8, 262144),
                 quantization_config=STATIC_FP8), 262144),
}  # fmt: skip
"""Config, and the context that it has."""

REFUSED: dict[str, tuple[Config, str]] = {
    "granite-8b-code": (
        llama(49152, 4096, 14336, 36, 32, 8, 4096, attention_bias=True, mlp_bias=True),
        "mlp_bias=True"),
    "Qwen2.5-7B-Instruct-1M": (
        qwen2(152064, 3584, 18944, 28, 28, 4, 1010000,
              dual_chunk_attention_config={"chunk_size": 262144, "local_size": 8192}),
        "dual_chunk_attention_config"),
    "Qwen3-8B in bitsandbytes": (
        qwen3(4096, 12288, 36, 32, 8, 40960, quantization_config={"quant_method": "bitsandbytes"}),
        "quant_method='bitsandbytes'"),
    "a Llama with dynamic NTK": (
        llama(32000, 4096, 11008, 32, 32, 32, 4096,
              rope_scaling={"type": "dynamic", "factor": 2.0}), "rope_type='dynamic'"),
    "a Llama with interleaved rotary channels": (
        smollm2(576, 1536, 30, 9, 3, rope_interleaved=True), "rope_interleaved=True"),
    "a Qwen3-MoE with a shared expert": (
        qwen3_moe(2048, 6144, 48, 32, 4, 40960, **CODER | {"shared_expert_intermediate_size": 512}),
        "shared_expert_intermediate_size=512"),
    "a GLM-4.5 whose experts are chosen in groups": (
        glm45(151552, 4096, 10944, 46, 96, 8, 131072, **GLM45_AIR | {"n_group": 8}), "n_group=8"),
    "a Gemma 3n that sees images": (
        gemma("Gemma3nForConditionalGeneration", "gemma3n", 262208, 2560, 10240, 34, 8, 4, 131072),
        "architectures"),
    "a bidirectional Gemma 3": (
        gemma("Gemma3ForCausalLM", "gemma3_text", 262144, 768, 1152, 24, 3, 1, 2048,
              **GEMMA3 | {"use_bidirectional_attention": True}),
        "use_bidirectional_attention=True"),
    "a Granite with biases in its feed-forward layers": (
        granite(49155, 4096, 12800, 40, 32, 8, 131072, mlp_bias=True), "mlp_bias=True"),
    "a Llama with longrope": (
        llama(32000, 4096, 11008, 32, 32, 32, 4096, rope_scaling=longrope(64)),
        "rope_type='longrope'"),
    "e5-mistral-7b": (
        mistral(32000, 4096, 14336, 32, 32, 8, 32768) | {"architectures": ["MistralModel"]},
        "architectures"),
}  # fmt: skip
"""Config, and what of it changes a logit in a way that is not computed."""
