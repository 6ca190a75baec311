# SPDX-License-Identifier: Apache-2.0
"""Mixtral: Mistral whose every feed-forward layer is a mixture of experts."""

from detjax.models.family import ROUTER_TRAINING, BiasRule, ExpertKeys, Family, WindowRule

MIXTRAL = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    defaults={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": None,  # hidden_size / num_attention_heads
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "sliding_window": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
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
)
