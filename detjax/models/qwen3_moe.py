# SPDX-License-Identifier: Apache-2.0
"""Qwen3 with mixtures of experts (30B-A3B, 235B-A22B): attention as in Qwen3."""

from detjax.models.family import ROUTER_TRAINING, BiasRule, ExpertKeys, Family, WindowRule

QWEN3_MOE = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    defaults={
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": None,  # hidden_size / num_attention_heads
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
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
)
