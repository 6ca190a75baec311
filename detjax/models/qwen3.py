# SPDX-License-Identifier: Apache-2.0
"""Qwen3 (dense): norms on the heads of q and k, no biases unless asked for."""

from detjax.models.family import BiasRule, Family, WindowRule

QWEN3 = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    defaults={
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    qkv_bias=BiasRule.AS_CONFIGURED,
    o_bias=BiasRule.AS_CONFIGURED,
    qk_norm=True,
    windows=WindowRule.BY_LAYER,
)
