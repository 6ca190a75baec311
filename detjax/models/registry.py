# SPDX-License-Identifier: Apache-2.0
"""Which families of models there are, as data. A new one is an entry here and a golden case."""

from typing import Any

from detjax.models.family import ROUTER_TRAINING, BiasRule, ExpertKeys, Family, WindowRule

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
_QWEN_WINDOWS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}

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
)


def supported_architectures() -> tuple[str, ...]:
    """Every value of `architectures` that can be loaded."""
    return tuple(name for family in FAMILIES for name in family.architectures)


def find_family(architectures: Any) -> Family:
    """The family that computes `architectures`, the list of one name in a `config.json`.

    Raises:
        ValueError: If it is not a list of one supported name; the message lists those that are.
    """
    for family in FAMILIES:
        for name in family.architectures:
            if architectures == [name]:
                return family
    raise ValueError(
        f"architectures={architectures!r} is not supported; detjax loads one of "
        f"{', '.join(supported_architectures())} (a list of one name in config.json)"
    )
