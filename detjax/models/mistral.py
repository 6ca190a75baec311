# SPDX-License-Identifier: Apache-2.0
"""Mistral 7B and Nemo: Llama with a sliding window over every layer, or none."""

from detjax.models.family import BiasRule, Family, WindowRule

MISTRAL = Family(
    name="mistral",
    architectures=("MistralForCausalLM",),
    defaults={
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
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    qkv_bias=BiasRule.NEVER,
    o_bias=BiasRule.NEVER,
    qk_norm=False,
    windows=WindowRule.EVERY_LAYER,
    checked={"attention_bias": (False,)},
)
