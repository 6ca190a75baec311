# SPDX-License-Identifier: Apache-2.0
"""Qwen2 and Qwen2.5: Llama with biases on q, k and v."""

from detjax.models.family import BiasRule, Family, WindowRule

QWEN2 = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    defaults={
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": None,  # hidden_size / num_attention_heads
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    qkv_bias=BiasRule.ALWAYS,
    o_bias=BiasRule.NEVER,
    qk_norm=False,
    windows=WindowRule.BY_LAYER,
)
