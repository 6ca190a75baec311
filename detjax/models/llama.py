# SPDX-License-Identifier: Apache-2.0
"""Llama (1, 2, 3, 3.1, 3.2) and what borrows its architecture."""

from detjax.models.family import BiasRule, Family, WindowRule

LLAMA = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    defaults={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,  # as many as query heads
        "head_dim": None,  # hidden_size / num_attention_heads
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    qkv_bias=BiasRule.AS_CONFIGURED,
    o_bias=BiasRule.AS_CONFIGURED,
    qk_norm=False,
    windows=WindowRule.NEVER,
    checked={"sliding_window": (None,), "use_sliding_window": (False,)},
)
