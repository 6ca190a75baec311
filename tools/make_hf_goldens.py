# SPDX-License-Identifier: Apache-2.0
"""Make the expected results that detjax is compared with, using Hugging Face transformers.

Nothing here imports detjax: the answers come from somebody else's code. tests/golden/README.md
says which environment to use and what every file holds.

    python tools/make_hf_goldens.py models     --out tests/golden/hf
    python tools/make_hf_goldens.py check      --out tests/golden/hf
    python tools/make_hf_goldens.py rope       --out tests/golden
    python tools/make_hf_goldens.py tokenizers --out tests/golden --qwen3 DIR --llama3 DIR

`models` builds one small random model a case, saves it as a Hugging Face folder, loads that folder
again and records logits, greedy continuations and rotary tables. `check` recomputes all of it from
the folders and fails on a difference. `rope` records the rotary tables of published model shapes.
`tokenizers` records token ids and rendered chats; the tokenizers themselves are not copied.
"""

import argparse
import contextlib
import copy
import dataclasses
import hashlib
import importlib
import json
import math
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path

import safetensors.torch
import tokenizers
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import modeling_rope_utils
from transformers.models.llama import modeling_llama

VOCAB_SIZE = 320
BOS_ID, EOS_ID = 1, 2
FIRST_TEXT_ID = 8  # ids below are kept for begin and end tokens and never appear in a prompt
NUM_GREEDY = 16
# Seeds are the first of seed, seed + 100, ... whose greedy steps keep this gap between the best two
# logits and never reach an end token, so that float32 has one right continuation.
MIN_GREEDY_MARGIN = 0.01
# Where experts are chosen, the last one chosen is ahead of the next by this at every recorded
# position, or bfloat16 would choose others: a jump, where a tolerance is for roundings.
MIN_ROUTER_MARGIN = 0.04
POSITIONS_BY_LENGTH = {
    5: (0, 1, 2, 3, 4),
    37: (0, 1, 7, 15, 16, 17, 23, 24, 25, 31, 32, 36),
    150: (0, 1, 16, 23, 24, 25, 63, 64, 65, 127, 128, 149),
}
ROPE_POSITIONS = (0, 1, 2, 3, 15, 16, 31, 63, 64, 65, 127, 149, 165)
LONG_ROPE_POSITIONS = (0, 1, 2, 1000, 4095, 8191, 8192, 32767, 131071)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


# --------------------------------------------------------------------------------------- cases


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Control:
    """A wrong reading of a case; the logits must move far more than any rounding moves them.

    Attributes:
        what: The mistake, in words.
        config: Config attributes to overwrite.
        fill: Parameter name suffix to the constant that replaces its values.
    """

    what: str
    config: dict = dataclasses.field(default_factory=dict)
    fill: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PublishedForm:
    """How the hub's own config.json of this family looks: its keys, and who wrote it.

    Attributes:
        keys: Exactly the keys of the published file.
        version: Its `transformers_version`.
        values: Values that transformers 5 does not write back (it resolves them first).
    """

    keys: str
    version: str
    values: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One model folder.

    Attributes:
        what: What this case exercises that its neighbours do not.
        model_type: Hugging Face model type.
        config: Arguments of the config class, over `BASE_CONFIG`.
        disk_dtype: Dtype of model.safetensors; the values are bf16 values in either.
        published: Write config_v4.json too, in the form that hub folders of this family use.
        is_mxfp4: Store the experts in MXFP4, whose values they have then.
    """

    name: str
    what: str
    model_type: str
    seed: int
    config: dict
    control: Control
    disk_dtype: torch.dtype = torch.bfloat16
    published: PublishedForm | None = None
    is_mxfp4: bool = False


BASE_CONFIG = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "tie_word_embeddings": False,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_SCALING = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


def plain_rope(theta: float) -> dict:
    """Rotary parameters without scaling."""
    return {"rope_type": "default", "rope_theta": theta}


LLAMA2_KEYS = """architectures bos_token_id eos_token_id hidden_act hidden_size initializer_range
    intermediate_size max_position_embeddings model_type num_attention_heads num_hidden_layers
    num_key_value_heads pretraining_tp rms_norm_eps rope_scaling tie_word_embeddings torch_dtype
    transformers_version use_cache vocab_size"""
LLAMA31_KEYS = """architectures attention_bias attention_dropout bos_token_id eos_token_id
    hidden_act hidden_size initializer_range intermediate_size max_position_embeddings mlp_bias
    model_type num_attention_heads num_hidden_layers num_key_value_heads pretraining_tp
    rms_norm_eps rope_scaling rope_theta tie_word_embeddings torch_dtype transformers_version
    use_cache vocab_size"""
MISTRAL_KEYS = """architectures attention_dropout bos_token_id eos_token_id hidden_act hidden_size
    initializer_range intermediate_size max_position_embeddings model_type num_attention_heads
    num_hidden_layers num_key_value_heads rms_norm_eps rope_theta sliding_window
    tie_word_embeddings torch_dtype transformers_version use_cache vocab_size"""
QWEN2_KEYS = """architectures attention_dropout bos_token_id eos_token_id hidden_act hidden_size
    initializer_range intermediate_size max_position_embeddings max_window_layers model_type
    num_attention_heads num_hidden_layers num_key_value_heads rms_norm_eps rope_theta
    sliding_window tie_word_embeddings torch_dtype transformers_version use_cache
    use_sliding_window vocab_size"""
QWEN3_KEYS = """architectures attention_bias attention_dropout bos_token_id eos_token_id head_dim
    hidden_act hidden_size initializer_range intermediate_size max_position_embeddings
    max_window_layers model_type num_attention_heads num_hidden_layers num_key_value_heads
    rms_norm_eps rope_scaling rope_theta sliding_window tie_word_embeddings torch_dtype
    transformers_version use_cache use_sliding_window vocab_size"""

QWEN3_MOE_KEYS = """architectures attention_bias attention_dropout bos_token_id decoder_sparse_step
    eos_token_id head_dim hidden_act hidden_size initializer_range intermediate_size
    max_position_embeddings max_window_layers mlp_only_layers model_type moe_intermediate_size
    norm_topk_prob num_attention_heads num_experts num_experts_per_tok num_hidden_layers
    num_key_value_heads output_router_logits rms_norm_eps rope_scaling rope_theta
    router_aux_loss_coef sliding_window tie_word_embeddings torch_dtype transformers_version
    use_cache use_sliding_window vocab_size"""
MIXTRAL_KEYS = """architectures attention_dropout bos_token_id eos_token_id hidden_act hidden_size
    initializer_range intermediate_size max_position_embeddings model_type num_attention_heads
    num_experts_per_tok num_hidden_layers num_key_value_heads num_local_experts
    output_router_logits rms_norm_eps rope_theta router_aux_loss_coef sliding_window
    tie_word_embeddings torch_dtype transformers_version use_cache vocab_size"""

GPT_OSS_KEYS = """architectures attention_bias attention_dropout eos_token_id experts_per_token
    head_dim hidden_act hidden_size initial_context_length initializer_range intermediate_size
    layer_types max_position_embeddings model_type num_attention_heads num_experts_per_tok
    num_hidden_layers num_key_value_heads num_local_experts output_router_logits pad_token_id
    quantization_config rms_norm_eps rope_scaling rope_theta router_aux_loss_coef sliding_window
    swiglu_limit tie_word_embeddings transformers_version use_cache vocab_size"""
GPT_OSS_CONFIG = {
    "bos_token_id": None,
    "num_attention_heads": 8,
    "head_dim": 16,
    "intermediate_size": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 4,
    "sliding_window": 24,
    "swiglu_limit": 1.5,
    "pad_token_id": 0,
    "rope_parameters": {**YARN_SCALING, "rope_theta": 150000.0, "truncate": False},
}

QWEN3_5_CONFIG = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        **plain_rope(10000000.0),
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    },
}

CASES = (
    Case(
        name="llama2",
        what="multi-head attention (no grouped queries), untied, theta 10000; the published form "
        "has no rope_theta, so the reader must know the default",
        model_type="llama",
        seed=201,
        config={"num_key_value_heads": 4, "rope_parameters": plain_rope(10000.0)},
        disk_dtype=torch.float32,
        control=Control(what="rope_theta 500000", config={"rope_parameters": plain_rope(500000.0)}),
        published=PublishedForm(keys=LLAMA2_KEYS, version="4.31.0.dev0"),
    ),
    Case(
        name="llama3",
        what="grouped queries, theta 500000, no scaling",
        model_type="llama",
        seed=302,
        config={"rope_parameters": plain_rope(500000.0)},
        control=Control(what="rope_theta 10000", config={"rope_parameters": plain_rope(10000.0)}),
    ),
    Case(
        name="llama31",
        what="llama3 rope scaling, factor 8 over 64 positions; a list of end tokens",
        model_type="llama",
        seed=503,
        config={
            "intermediate_size": 144,
            "max_position_embeddings": 512,
            "eos_token_id": [2, 3, 4],
            "rope_parameters": LLAMA3_SCALING,
        },
        control=Control(
            what="rope scaling ignored", config={"rope_parameters": plain_rope(500000.0)}
        ),
        published=PublishedForm(keys=LLAMA31_KEYS, version="4.42.3"),
    ),
    Case(
        name="llama32",
        what="tied embeddings, three queries a key head, llama3 rope scaling with factor 32",
        model_type="llama",
        seed=504,
        config={
            "hidden_size": 96,
            "intermediate_size": 176,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
            "rope_parameters": {**LLAMA3_SCALING, "factor": 32.0},
        },
        control=Control(what="factor 8", config={"rope_parameters": LLAMA3_SCALING}),
    ),
    Case(
        name="llama_linear",
        what="linear rope scaling, factor 4",
        model_type="llama",
        seed=705,
        config={"rope_parameters": {**plain_rope(10000.0), "rope_type": "linear", "factor": 4.0}},
        control=Control(
            what="rope scaling ignored", config={"rope_parameters": plain_rope(10000.0)}
        ),
    ),
    Case(
        name="llama_yarn",
        what="yarn with its defaults, factor 4 over 64 positions",
        model_type="llama",
        seed=306,
        config={
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "intermediate_size": 80,
            "rope_parameters": YARN_SCALING,
        },
        control=Control(
            what="attention factor 1",
            config={"rope_parameters": {**YARN_SCALING, "attention_factor": 1.0}},
        ),
    ),
    Case(
        name="llama_yarn_explicit",
        what="yarn with attention_factor, beta_fast and beta_slow given",
        model_type="llama",
        seed=307,
        config={
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "intermediate_size": 80,
            "rope_parameters": {
                **YARN_SCALING,
                "attention_factor": 1.25,
                "beta_fast": 4.0,
                "beta_slow": 0.25,
            },
        },
        control=Control(
            what="beta_fast and beta_slow ignored",
            config={"rope_parameters": {**YARN_SCALING, "attention_factor": 1.25}},
        ),
    ),
    Case(
        name="llama_yarn_mscale",
        what="yarn with mscale, mscale_all_dim and truncate=false",
        model_type="llama",
        seed=1008,
        config={
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "intermediate_size": 80,
            "rope_parameters": {
                **YARN_SCALING,
                "mscale": 1.5,
                "mscale_all_dim": 0.5,
                "truncate": False,
            },
        },
        control=Control(
            what="truncate ignored",
            config={"rope_parameters": {**YARN_SCALING, "mscale": 1.5, "mscale_all_dim": 0.5}},
        ),
    ),
    Case(
        name="llama_bias",
        what="attention_bias: biases on q, k, v and o",
        model_type="llama",
        seed=209,
        config={"attention_bias": True, "rope_parameters": plain_rope(10000.0)},
        control=Control(what="o_proj bias dropped", fill={"o_proj.bias": 0.0}),
    ),
    Case(
        name="mistral_v03",
        what="sliding_window null, four queries a key head",
        model_type="mistral",
        seed=110,
        config={
            "num_key_value_heads": 1,
            "sliding_window": None,
            "rope_parameters": plain_rope(1000000.0),
        },
        disk_dtype=torch.float32,
        control=Control(what="a window of 24", config={"sliding_window": 24}),
        published=PublishedForm(keys=MISTRAL_KEYS, version="4.42.0.dev0"),
    ),
    Case(
        name="mistral_window",
        what="sliding_window 24: query i sees keys i-23 to i, itself included",
        model_type="mistral",
        seed=411,
        config={"sliding_window": 24, "rope_parameters": plain_rope(10000.0)},
        control=Control(what="a window of 25", config={"sliding_window": 25}),
    ),
    Case(
        name="qwen2",
        what="biases on q, k and v only; use_sliding_window false with a sliding_window in the "
        "published form",
        model_type="qwen2",
        seed=112,
        config={
            "hidden_size": 96,
            "intermediate_size": 80,
            "num_attention_heads": 6,
            "rms_norm_eps": 1e-6,
            "use_sliding_window": False,
            "sliding_window": 24,
            "max_window_layers": 0,
            "rope_parameters": plain_rope(1000000.0),
        },
        control=Control(
            what="sliding_window 24 obeyed",
            config={"sliding_window": 24, "layer_types": ["sliding_attention"] * 2},
        ),
        published=PublishedForm(keys=QWEN2_KEYS, version="4.43.1", values={"sliding_window": 24}),
    ),
    Case(
        name="qwen25",
        what="tied embeddings, biases on q, k and v, seven queries a key head",
        model_type="qwen2",
        seed=513,
        config={
            "hidden_size": 112,
            "intermediate_size": 144,
            "num_attention_heads": 7,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "rope_parameters": plain_rope(1000000.0),
        },
        control=Control(what="v_proj bias dropped", fill={"v_proj.bias": 0.0}),
    ),
    Case(
        name="qwen3",
        what="norms on q and k, head_dim 32 where hidden/heads is 16",
        model_type="qwen3",
        seed=214,
        config={
            "head_dim": 32,
            "intermediate_size": 80,
            "rms_norm_eps": 1e-6,
            "use_sliding_window": False,
            "rope_parameters": plain_rope(1000000.0),
        },
        control=Control(
            what="gains of q_norm and k_norm taken as 1",
            fill={"q_norm.weight": 1.0, "k_norm.weight": 1.0},
        ),
        published=PublishedForm(
            keys=QWEN3_KEYS, version="4.51.0", values={"rope_theta": 1000000, "rope_scaling": None}
        ),
    ),
    Case(
        name="qwen3_moe",
        what="8 experts, 2 of a token, whose weights add up to 1",
        model_type="qwen3_moe",
        seed=10015,
        config={
            "head_dim": 32,
            "moe_intermediate_size": 48,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-6,
            "rope_parameters": plain_rope(1000000.0),
        },
        control=Control(what="norm_topk_prob ignored", config={"norm_topk_prob": False}),
        published=PublishedForm(
            keys=QWEN3_MOE_KEYS,
            version="4.51.0",
            values={"num_experts": 8, "max_window_layers": 2, "rope_scaling": None},
        ),
    ),
    Case(
        name="qwen3_moe_mixed",
        what="dense layers by decoder_sparse_step 2 and mlp_only_layers; weights that do not add "
        "up to 1, 3 experts of a token",
        model_type="qwen3_moe",
        seed=316,
        config={
            "num_hidden_layers": 4,
            "moe_intermediate_size": 32,
            "intermediate_size": 80,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "rms_norm_eps": 1e-6,
            "rope_parameters": plain_rope(1000000.0),
        },
        control=Control(what="norm_topk_prob taken as true", config={"norm_topk_prob": True}),
    ),
    Case(
        name="mixtral",
        what="4 experts, 2 of a token, under Mixtral's names; sliding_window null",
        model_type="mixtral",
        seed=5017,
        config={
            "intermediate_size": 80,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": None,
            "rope_parameters": plain_rope(1000000.0),
        },
        control=Control(what="1 expert of a token", config={"num_experts_per_tok": 1}),
        published=PublishedForm(keys=MIXTRAL_KEYS, version="4.36.0.dev0"),
    ),
    Case(
        name="granite",
        what="multipliers of embeddings, residual stream, scores and logits; tied",
        model_type="granite",
        seed=601,
        config={
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0625,
            "logits_scaling": 2.0,
            "tie_word_embeddings": True,
            "rope_parameters": plain_rope(10000.0),
        },
        control=Control(what="attention_multiplier 0.25", config={"attention_multiplier": 0.25}),
    ),
    Case(
        name="smollm3",
        what="layers 1 and 3 of 4 have no rotary embedding",
        model_type="smollm3",
        seed=902,
        config={
            "num_hidden_layers": 4,
            "intermediate_size": 80,
            "no_rope_layer_interval": 2,
            "pad_token_id": 0,
            "tie_word_embeddings": True,
            "rope_parameters": plain_rope(5000000.0),
        },
        control=Control(what="all layers rotated", config={"no_rope_layers": [1, 1, 1, 1]}),
    ),
    Case(
        name="phi3",
        what="joined projections, multi-head attention, a window",
        model_type="phi3",
        seed=903,
        config={
            "num_key_value_heads": 4,
            "sliding_window": 24,
            "pad_token_id": 0,
            "rope_parameters": plain_rope(10000.0),
        },
        control=Control(what="a window of 25", config={"sliding_window": 25}),
    ),
    Case(
        name="phi4_longrope",
        what="joined projections, three quarters of the channels rotated, longrope below its "
        "original context; tied",
        model_type="phi3",
        seed=1004,
        config={
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 1024,
            "original_max_position_embeddings": 256,
            "pad_token_id": 0,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [round(1 + 0.0625 * i, 4) for i in range(12)],
                "long_factor": [round(1 + 2.5 * i, 4) for i in range(12)],
                "original_max_position_embeddings": 256,
            },
        },
        control=Control(
            what="factors ignored",
            config={"rope_parameters": {**plain_rope(10000.0), "partial_rotary_factor": 0.75}},
        ),
    ),
    Case(
        name="seed_oss",
        what="biases on q, k and v, none on o; heads wider than hidden_size / num_attention_heads",
        model_type="seed_oss",
        seed=705,
        config={"head_dim": 32, "pad_token_id": 0, "rope_parameters": plain_rope(10000000.0)},
        control=Control(what="v_proj bias dropped", fill={"v_proj.bias": 0.0}),
    ),
    Case(
        name="glm4",
        what="norms before and after, half of the channels rotated in neighbouring pairs, joined "
        "gate and up, biases on q, k and v",
        model_type="glm4",
        seed=706,
        config={
            "head_dim": 32,
            "intermediate_size": 80,
            "pad_token_id": 0,
            "rope_parameters": {**plain_rope(10000.0), "partial_rotary_factor": 0.5},
        },
        control=Control(
            what="all channels rotated",
            config={"rope_parameters": {**plain_rope(10000.0), "partial_rotary_factor": 1.0}},
        ),
    ),
    Case(
        name="glm",
        what="glm4 without the norms after",
        model_type="glm",
        seed=613,
        config={
            "head_dim": 32,
            "intermediate_size": 80,
            "pad_token_id": 0,
            "rope_parameters": {**plain_rope(10000.0), "partial_rotary_factor": 0.5},
        },
        control=Control(what="v_proj bias dropped", fill={"v_proj.bias": 0.0}),
    ),
    Case(
        name="ernie4_5",
        what="all channels rotated in neighbouring pairs; tied",
        model_type="ernie4_5",
        seed=912,
        config={
            "head_dim": 32,
            "intermediate_size": 80,
            "tie_word_embeddings": True,
            "rope_parameters": plain_rope(500000.0),
        },
        control=Control(what="rope_theta 10000", config={"rope_parameters": plain_rope(10000.0)}),
    ),
    Case(
        name="olmo2",
        what="norms after, norms over all heads of q and of k",
        model_type="olmo2",
        seed=807,
        config={"pad_token_id": 0, "rope_parameters": plain_rope(500000.0)},
        control=Control(
            what="gains of q_norm and k_norm taken as 1",
            fill={"q_norm.weight": 1.0, "k_norm.weight": 1.0},
        ),
    ),
    Case(
        name="olmo3",
        what="olmo2 with windows of 24 in three layers of four, which yarn leaves alone",
        model_type="olmo3",
        seed=708,
        config={
            "num_hidden_layers": 4,
            "intermediate_size": 80,
            "sliding_window": 24,
            "pad_token_id": 0,
            "rope_parameters": {
                "full_attention": YARN_SCALING,
                "sliding_attention": plain_rope(10000.0),
            },
        },
        control=Control(
            what="yarn in all layers",
            config={
                "rope_parameters": {
                    "full_attention": YARN_SCALING,
                    "sliding_attention": YARN_SCALING,
                }
            },
        ),
    ),
    Case(
        name="exaone4",
        what="norms after, norms on the heads of q and k, windows of 24 in three layers of four, "
        "the fourth without rotary embedding",
        model_type="exaone4",
        seed=809,
        config={
            "num_hidden_layers": 4,
            "intermediate_size": 80,
            "sliding_window": 24,
            "sliding_window_pattern": 4,
            "rope_parameters": plain_rope(1000000.0),
        },
        control=Control(what="a window of 25", config={"sliding_window": 25}),
    ),
    Case(
        name="gemma2",
        what="gains of 1 + w, norms before and after, GeGLU, soft caps on scores and logits, a "
        "window in every other layer, a scale on queries and one on embeddings; tied",
        model_type="gemma2",
        seed=610,
        config={
            "hidden_size": 96,
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 6.0,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
            "rope_parameters": plain_rope(10000.0),
        },
        control=Control(what="no soft cap on scores", config={"attn_logit_softcapping": None}),
    ),
    Case(
        name="gemma3",
        what="gemma2 without soft caps, with norms on the heads of q and k, two rotary bases and "
        "linear scaling of one",
        model_type="gemma3_text",
        seed=611,
        config={
            "hidden_size": 96,
            "head_dim": 32,
            "num_hidden_layers": 4,
            "intermediate_size": 80,
            "query_pre_attn_scalar": 24,
            "sliding_window": 24,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "tie_word_embeddings": True,
            "pad_token_id": 0,
            "rope_parameters": {
                "full_attention": {**plain_rope(1000000.0), "rope_type": "linear", "factor": 8.0},
                "sliding_attention": plain_rope(10000.0),
            },
        },
        control=Control(what="a window of 25", config={"sliding_window": 25}),
    ),
    Case(
        name="gpt_oss",
        what="sinks, a window of 24 in every other layer, biases of attention, router and experts, "
        "clamped SwiGLU, yarn with truncate=false; experts in MXFP4",
        model_type="gpt_oss",
        seed=199601,
        config=GPT_OSS_CONFIG,
        control=Control(what="sinks dropped", fill={"self_attn.sinks": -100.0}),
        published=PublishedForm(
            keys=GPT_OSS_KEYS,
            version="4.55.0.dev0",
            values={"experts_per_token": 4, "initial_context_length": 64},
        ),
        is_mxfp4=True,
    ),
    Case(
        name="qwen3_5",
        what="three layers of gated DeltaNet and one of attention with an output gate; two heads "
        "of values a head of keys, a quarter of the channels rotated, gains 1 + w",
        model_type="qwen3_5_text",
        seed=201301,
        config=QWEN3_5_CONFIG,
        control=Control(what="states that do not fade", fill={"A_log": -20.0}),
    ),
    Case(
        name="ministral3",
        what="queries scaled by position from the 64th token on, yarn with both mscales",
        model_type="ministral3",
        seed=1201,
        config={
            "head_dim": 32,
            "intermediate_size": 80,
            "pad_token_id": 0,
            "rope_parameters": {
                **YARN_SCALING,
                "rope_theta": 1000000.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.4,
            },
        },
        control=Control(
            what="queries not scaled",
            config={
                "rope_parameters": {
                    **YARN_SCALING,
                    "rope_theta": 1000000.0,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "llama_4_scaling_beta": 0.0,
                }
            },
        ),
    ),
    Case(
        name="qwen2_moe",
        what="a shared expert with a gate beside 4 experts, 2 of a token, whose weights do not add "
        "up to 1; biases on q, k and v; a dense layer by mlp_only_layers",
        model_type="qwen2_moe",
        seed=2101,
        config={
            "num_hidden_layers": 3,
            "intermediate_size": 80,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mlp_only_layers": [1],
            "rms_norm_eps": 1e-6,
            "rope_parameters": plain_rope(1000000.0),
        },
        control=Control(
            what="no gate of the shared expert", fill={"shared_expert_gate.weight": 0.0}
        ),
    ),
    Case(
        name="qwen3_5_moe",
        what="qwen3_5 of two layers whose feed-forward layers are 4 experts, 2 of a token, and a "
        "shared expert with a gate",
        model_type="qwen3_5_moe_text",
        seed=19101,
        config={
            **QWEN3_5_CONFIG,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
        control=Control(
            what="no gate of the shared expert", fill={"shared_expert_gate.weight": 0.0}
        ),
    ),
    Case(
        name="qwen3_next",
        what="qwen3_5 of two layers with projections joined by heads of keys, 4 experts, 2 of a "
        "token, and a shared expert with a gate; a dense layer by mlp_only_layers",
        model_type="qwen3_next",
        seed=20701,
        config={
            **QWEN3_5_CONFIG,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "rope_parameters": {**plain_rope(10000000.0), "partial_rotary_factor": 0.25},
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mlp_only_layers": [0],
        },
        control=Control(
            what="no gate of the shared expert", fill={"shared_expert_gate.weight": 0.0}
        ),
    ),
    Case(
        name="glm4_moe",
        what="experts chosen by sigmoids and a correction that does not weigh, 2 of 4, of which "
        "weights add up to 2.5, a shared expert without a gate, a dense layer first; half of the "
        "channels rotated, biases on q, k and v, norms on the heads of q and k",
        model_type="glm4_moe",
        seed=2501,
        config={
            "num_hidden_layers": 3,
            "head_dim": 32,
            "moe_intermediate_size": 48,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "attention_bias": True,
            "use_qk_norm": True,
            "rope_parameters": {**plain_rope(1000000.0), "partial_rotary_factor": 0.5},
        },
        control=Control(
            what="no correction in the choice", fill={"gate.e_score_correction_bias": 0.0}
        ),
    ),
    Case(
        name="gpt_oss_bfloat16",
        what="gpt_oss with experts in bfloat16, without biases in attention",
        model_type="gpt_oss",
        seed=190802,
        config={**GPT_OSS_CONFIG, "attention_bias": False, "swiglu_limit": 1.25},
        control=Control(what="swiglu_limit 7", config={"swiglu_limit": 7.0}),
    ),
)

PUBLISHED_ROPES = {
    "llama2_7b": (128, 4096, plain_rope(10000.0)),
    "llama3_8b": (128, 8192, plain_rope(500000.0)),
    "llama31_8b": (128, 131072, {**LLAMA3_SCALING, "original_max_position_embeddings": 8192}),
    "llama32_1b": (
        64,
        131072,
        {**LLAMA3_SCALING, "factor": 32.0, "original_max_position_embeddings": 8192},
    ),
    "mistral_7b_v03_and_qwen3_8b": (128, 40960, plain_rope(1000000.0)),
    "qwen25_7b_yarn4": (
        128,
        131072,
        {
            **YARN_SCALING,
            "rope_theta": 1000000.0,
            "original_max_position_embeddings": 32768,
        },
    ),
    "llama2_7b_linear4": (
        128,
        16384,
        {**plain_rope(10000.0), "rope_type": "linear", "factor": 4.0},
    ),
    "yarn40_mscale": (
        64,
        163840,
        {
            **YARN_SCALING,
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.707,
        },
    ),
    "yarn32_untruncated": (
        64,
        131072,
        {
            **YARN_SCALING,
            "rope_theta": 150000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    ),
}


# ------------------------------------------------------------------------------------- float64


class _Float64Torch:
    """The torch module with float64 wherever a modelling file names float32."""

    def __getattr__(self, name: str):
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)


class _NoNarrowFloat(TorchDispatchMode):
    """Fail on the first operation whose floating-point result is not float64."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(out):
            is_float = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
            if is_float and leaf.dtype != torch.float64:
                raise AssertionError(f"{func} gave {leaf.dtype} inside the float64 reference")
        return out


@contextlib.contextmanager
def float64_everywhere() -> Iterator[None]:
    """Make the modelling files compute in float64 throughout.

    `model.double()` is not enough: RMSNorm, softmax and the rotary tables name float32 themselves.
    """
    families = {case.model_type.removesuffix("_text") for case in CASES}
    modules = [
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        for name in sorted(families)
    ]
    modules.append(modeling_rope_utils)
    tensor_float = torch.Tensor.float
    try:
        for module in modules:
            module.torch = _Float64Torch()
        torch.Tensor.float = torch.Tensor.double
        torch.set_default_dtype(torch.float64)  # of a quotient of integers
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.Tensor.float = tensor_float
        for module in modules:
            module.torch = torch


# --------------------------------------------------------------------------------------- models


def random_model(case: Case) -> transformers.PreTrainedModel:
    """Fill the model of a case with seeded random values, each a bf16 value."""
    config = transformers.AutoConfig.for_model(
        case.model_type, **copy.deepcopy({**BASE_CONFIG, **case.config})
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(case.seed)
    std = init_std(case)
    with torch.no_grad():
        for name, parameter in weights_of(model):
            if "norm" in name.split(".")[-2]:
                value = torch.rand(parameter.shape, generator=generator) + 0.5
                # Gains are 1 + w, but for those of gated norms.
                if case.model_type.startswith(ONE_PLUS_GAINS) and "linear_attn" not in name:
                    value -= 1
            elif name.endswith("A_log"):  # states that fade in one to hundreds of tokens
                value = torch.randn(parameter.shape, generator=generator) * 1.5 - 2.5
            elif name.endswith("conv1d.weight"):
                value = torch.randn(parameter.shape, generator=generator) * 0.5
            elif name.endswith("bias"):
                value = torch.randn(parameter.shape, generator=generator) * 0.3
            elif name.endswith("sinks"):
                value = torch.randn(parameter.shape, generator=generator)
            else:
                value = torch.randn(parameter.shape, generator=generator) * std
            if case.is_mxfp4 and name.endswith(MXFP4_TENSORS):
                value = mxfp4_values(*mxfp4_codes(value)).transpose(1, 2)
            parameter.copy_(value if is_wide(case, name) else value.bfloat16())
    return model


def weights_of(model) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, and buffers that a checkpoint holds, by name."""
    yield from model.named_parameters()
    held = model.state_dict()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in held)


def is_wide(case: Case, name: str) -> bool:
    """Whether transformers keeps a weight in float32, so that it is no bf16 value here."""
    return case.model_type == "glm4_moe" and name.endswith(ROUTER_OF_SIGMOIDS)


def save_model(case: Case, folder: Path) -> None:
    """Write the random model of a case as a Hugging Face folder."""
    model = random_model(case)
    wide = {name: w.clone() for name, w in weights_of(model) if is_wide(case, name)}
    model.to(case.disk_dtype)
    for name, weight in weights_of(model):
        if name in wide:
            weight.data = wide[name]
    model.save_pretrained(folder)


ONE_PLUS_GAINS = ("gemma", "qwen3_5", "qwen3_next")
ROUTER_OF_SIGMOIDS = ("mlp.gate.weight", "e_score_correction_bias")
MXFP4_TENSORS = ("experts.gate_up_proj", "experts.down_proj")
MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MXFP4_BLOCK = 32


def mxfp4_codes(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Nearest MXFP4 of experts [E, in, out]: codes [E, out, blocks, 32] and biased exponents."""
    num_experts, num_in, num_out = value.shape
    rows = value.transpose(1, 2).reshape(num_experts, num_out, num_in // MXFP4_BLOCK, MXFP4_BLOCK)
    exponents = torch.ceil(torch.log2(rows.abs().amax(dim=3) / MXFP4_VALUES[-1]))
    scaled = rows / torch.exp2(exponents)[..., None]
    distances = (scaled.abs()[..., None] - torch.tensor(MXFP4_VALUES)).abs()
    codes = distances.argmin(dim=4) + 8 * (scaled < 0)
    return codes.to(torch.uint8), (exponents + 127).to(torch.uint8)


def mxfp4_values(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """What codes and exponents of `mxfp4_codes` stand for, [E, out, in]."""
    values = torch.tensor([*MXFP4_VALUES, *(-v for v in MXFP4_VALUES)])[codes.long()]
    return (values * torch.exp2(exponents.float() - 127)[..., None]).flatten(2)


def store_in_mxfp4(folder: Path) -> None:
    """Rewrite a saved folder as gpt-oss is published: experts in MXFP4, two codes a byte."""
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    for name in [name for name in tensors if name.endswith(MXFP4_TENSORS)]:
        value = tensors.pop(name).float()
        codes, exponents = mxfp4_codes(value)
        assert torch.equal(mxfp4_values(codes, exponents), value.transpose(1, 2)), name
        tensors[f"{name}_blocks"] = codes[..., ::2] + 16 * codes[..., 1::2]
        tensors[f"{name}_scales"] = exponents
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    kept = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens")
    config["quantization_config"] = {
        "modules_to_not_convert": [*kept, "lm_head"],
        "quant_method": "mxfp4",
    }
    write_json(folder / "config.json", config)


def init_std(case: Case) -> float:
    """Standard deviation of every matrix: a normalised row keeps a spread of 1.2."""
    return round(1.2 / math.sqrt(case.config.get("hidden_size", BASE_CONFIG["hidden_size"])), 3)


def load_model(folder: Path, dtype: torch.dtype, **kwargs) -> transformers.PreTrainedModel:
    """Load a saved folder the way a user does, with eager attention.

    Not `model.to(dtype)`: that would also round the rotary frequencies to bf16, which
    `from_pretrained` leaves in float32.
    """
    if "quantization_config" in json.loads((folder / "config.json").read_text()):
        kwargs["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",
        **kwargs,
    ).eval()


def logits_at(model, ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """Logits of one whole-sequence forward at the chosen positions, in the model's dtype."""
    with torch.inference_mode():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits[list(positions)].clone()


def router_margin(model, ids: Sequence[int], positions: Sequence[int]) -> float:
    """Least gap between the last expert chosen and the next, over layers and chosen positions."""
    with torch.inference_mode():
        out = model(torch.tensor([ids]), use_cache=False, output_router_logits=True)
    held = model.state_dict()
    corrections = [held[name] for name in held if name.endswith("e_score_correction_bias")]
    margins = []
    for layer, logits in enumerate(out.router_logits):
        logits = logits.reshape(len(ids), -1)[list(positions)]
        # A sigmoid moves by a quarter of what its logit does, or less.
        scores = 4 * (logits.sigmoid() + corrections[layer]) if corrections else logits
        best = scores.topk(model.config.num_experts_per_tok + 1).values
        margins.append(float((best[:, -2] - best[:, -1]).min()))
    return min(margins)


def greedy(model, prompt_ids: Sequence[int]) -> tuple[list[int], list[float]]:
    """Continue greedily without a cache; also the gap between the best two logits of each step."""
    ids, margins = list(prompt_ids), []
    for _ in range(NUM_GREEDY):
        best = logits_at(model, ids, [len(ids) - 1])[0].topk(2)
        margins.append(float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
    return ids[len(prompt_ids) :], margins


def prompts_of(case: Case) -> list[list[int]]:
    """Random prompts, one a length in POSITIONS_BY_LENGTH, each starting with the begin token."""
    generator = torch.Generator().manual_seed(case.seed + 1000)
    return [
        [
            BOS_ID,
            *torch.randint(FIRST_TEXT_ID, VOCAB_SIZE, (n - 1,), generator=generator).tolist(),
        ]
        for n in POSITIONS_BY_LENGTH
    ]


def rope_kinds(rotary) -> dict[str, tuple[str, tuple]]:
    """By the name of a table: prefix of the module's attributes, and arguments that choose it."""
    if not hasattr(rotary, "layer_types"):
        return {"rope": ("", ())}
    kinds = {"rope": "full_attention", "rope_window": "sliding_attention"}
    return {table: (f"{kind}_", (kind,)) for table, kind in kinds.items()}


def rope_tables(rotary, positions: Sequence[int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Frequencies and the first half of the cos and sin tables (the second half repeats it)."""
    name, tables = str(dtype).removeprefix("torch."), {}
    for table, (prefix, chosen) in rope_kinds(rotary).items():
        cos, sin = rotary(torch.zeros(1, dtype=dtype), torch.tensor([list(positions)]), *chosen)
        half = getattr(rotary, f"{prefix}inv_freq").shape[0]  # gpt-oss has one half alone
        assert torch.equal(cos[..., :half], cos[..., -half:]), "the halves of the cos table differ"
        tables |= {
            f"{table}.inv_freq_{name}": getattr(rotary, f"{prefix}inv_freq").clone(),
            f"{table}.cos_{name}": cos[0, :, :half].clone(),
            f"{table}.sin_{name}": sin[0, :, :half].clone(),
        }
    return tables


def compute(
    folder: Path, prompts: Sequence[Sequence[int]], **kwargs
) -> tuple[dict[str, torch.Tensor], dict]:
    """Everything that is recorded about a saved folder, read back from disk.

    Returns:
        The tensors, and the greedy ids and margins with the rotary attention scaling.
    """
    tensors = {}
    facts = {"greedy_ids": [], "greedy_margins": []}
    for name, dtype in DTYPES.items():
        is_reference = dtype == torch.float64
        with contextlib.ExitStack() as stack:
            if is_reference:
                stack.enter_context(float64_everywhere())
            model = load_model(folder, dtype, **kwargs)
            if is_reference:
                stack.enter_context(_NoNarrowFloat())
            for i, ids in enumerate(prompts):
                logits = logits_at(model, ids, POSITIONS_BY_LENGTH[len(ids)])
                assert logits.dtype == dtype, f"{logits.dtype=} where {dtype} was asked for"
                tensors[f"prompt{i}.logits_{name}"] = logits
            rotary = model.model.rotary_emb
            full = rope_kinds(rotary)["rope"][0]
            if dtype != torch.bfloat16:
                tensors |= rope_tables(rotary, ROPE_POSITIONS, dtype)
            else:
                frequencies = getattr(rotary, f"{full}inv_freq")
                assert frequencies.dtype == torch.float32
                assert torch.equal(frequencies, tensors["rope.inv_freq_float32"])
            if dtype == torch.float32:
                facts["attention_scaling"] = float(getattr(rotary, f"{full}attention_scaling"))
                for ids in prompts:
                    next_ids, margins = greedy(model, ids)
                    generated = model.generate(
                        torch.tensor([ids]),
                        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                        max_new_tokens=NUM_GREEDY,
                        do_sample=False,
                        pad_token_id=0,
                    )[0, len(ids) :].tolist()
                    assert generated == next_ids, f"{generated=} but without a cache {next_ids=}"
                    facts["greedy_ids"].append(next_ids)
                    facts["greedy_margins"].append([round(m, 6) for m in margins])
            if is_reference:
                for ids, next_ids in zip(prompts, facts["greedy_ids"], strict=True):
                    assert greedy(model, ids)[0] == next_ids, "float64 chooses other tokens"
    return tensors, facts


def max_abs_error(tensors: dict[str, torch.Tensor], name: str) -> float:
    """Largest distance of the logits in one dtype from the float64 ones."""
    return max(
        float((tensors[key].double() - tensors[key.replace(name, "float64")]).abs().max())
        for key in tensors
        if key.endswith(f"logits_{name}")
    )


def control_change(folder: Path, case: Case, prompts, tensors: dict[str, torch.Tensor]) -> float:
    """How far the control's mistake moves the float32 logits."""
    config = transformers.AutoConfig.from_pretrained(folder)
    for key, value in copy.deepcopy(case.control.config).items():
        setattr(config, key, value)
    model = load_model(folder, torch.float32, config=config)
    with torch.no_grad():
        for name, parameter in weights_of(model):
            for suffix, value in case.control.fill.items():
                if name.endswith(suffix):
                    parameter.fill_(value)
    return max(
        float(
            (
                logits_at(model, ids, POSITIONS_BY_LENGTH[len(ids)])
                - tensors[f"prompt{i}.logits_float32"]
            )
            .abs()
            .max()
        )
        for i, ids in enumerate(prompts)
    )


def published_config(config: dict, form: PublishedForm) -> dict:
    """Rewrite a transformers 5 config in the older form that hub folders use."""
    rope = dict(config["rope_parameters"])
    theta = rope.pop("rope_theta")
    old = {
        **config,
        "rope_theta": theta,
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "torch_dtype": config["dtype"],
        "transformers_version": form.version,
        **form.values,
    }
    return {key: old[key] for key in form.keys.split()}


def render_json(value, indent: int = 0) -> str:
    """JSON with one line an entry, except that a list of numbers or words stays on its line."""
    is_nested = isinstance(value, dict) or (
        isinstance(value, list) and any(isinstance(entry, dict | list) for entry in value)
    )
    if not is_nested or not value:
        return json.dumps(value)
    pad = " " * (indent + 2)
    if isinstance(value, dict):
        lines = [f"{pad}{json.dumps(k)}: {render_json(v, indent + 2)}" for k, v in value.items()]
    else:
        lines = [pad + render_json(entry, indent + 2) for entry in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return opening + "\n" + ",\n".join(lines) + "\n" + " " * indent + closing


def write_json(path: Path, value) -> None:
    """Write `value` and read it back."""
    path.write_text(render_json(value) + "\n", encoding="utf-8")
    assert json.loads(path.read_text(encoding="utf-8")) == value, f"{path} does not read back"


def versions() -> dict:
    """What computed the numbers."""
    return {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "tokenizers": tokenizers.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "num_threads": torch.get_num_threads(),
    }


def make_case(case: Case, folder: Path) -> dict:
    """Write one folder and return its row of the table."""
    folder.mkdir(parents=True, exist_ok=True)
    save_model(case, folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if case.is_mxfp4:
        store_in_mxfp4(folder)
    if case.published is not None:
        config = json.loads((folder / "config.json").read_text())
        write_json(folder / "config_v4.json", published_config(config, case.published))

    prompts = prompts_of(case)
    if "num_experts_per_tok" in case.config:
        model = load_model(folder, torch.float32)
        margin = min(router_margin(model, ids, POSITIONS_BY_LENGTH[len(ids)]) for ids in prompts)
        assert margin >= MIN_ROUTER_MARGIN, f"take another seed: experts are chosen by {margin=}"
    tensors, facts = compute(folder, prompts)
    margins = facts["greedy_margins"]
    assert min(map(min, margins)) >= MIN_GREEDY_MARGIN, f"take another seed: {margins=}"
    row = {
        "max_abs_float32_minus_float64": max_abs_error(tensors, "float32"),
        "max_abs_bfloat16_minus_float64": max_abs_error(tensors, "bfloat16"),
        "std_of_logits": float(tensors["prompt2.logits_float64"].std()),
        "control": case.control.what,
        "control_max_abs_change": control_change(folder, case, prompts, tensors),
    }
    safetensors.torch.save_file(tensors, folder / "expected.safetensors")
    write_json(
        folder / "expected.json",
        {
            "case": case.name,
            "what": case.what,
            "seed": case.seed,
            "init_std": init_std(case),
            "versions": versions(),
            "prompts": [
                {
                    "ids": ids,
                    "positions": list(POSITIONS_BY_LENGTH[len(ids)]),
                    "greedy_ids": facts["greedy_ids"][i],
                    "greedy_margins": facts["greedy_margins"][i],
                }
                for i, ids in enumerate(prompts)
            ],
            "rope": {
                "positions": list(ROPE_POSITIONS),
                "attention_scaling": facts["attention_scaling"],
            },
            "errors": row,
        },
    )
    return row


# The recorded float64 is reproduced to this on another CPU; 1e-14 is a few ulp of a logit.
FLOAT64_TOLERANCE = 1e-11


def check_case(case: Case, folder: Path) -> dict:
    """Recompute one folder and return its row; fail if it is not what was recorded."""
    recorded = safetensors.torch.load_file(folder / "expected.safetensors")
    expected = json.loads((folder / "expected.json").read_text())
    prompts = [p["ids"] for p in expected["prompts"]]
    tensors, facts = compute(folder, prompts)
    assert tensors.keys() == recorded.keys(), tensors.keys() ^ recorded.keys()
    assert facts["greedy_ids"] == [p["greedy_ids"] for p in expected["prompts"]]
    allowed = {
        "float64": FLOAT64_TOLERANCE,
        "float32": 2 * expected["errors"]["max_abs_float32_minus_float64"],
        "bfloat16": 2 * expected["errors"]["max_abs_bfloat16_minus_float64"],
    }
    for key, value in tensors.items():
        difference = float((value.double() - recorded[key].double()).abs().max())
        limit = allowed[key.rsplit("_", 1)[1]]
        assert difference <= limit, f"{case.name} {key}: {difference} is over {limit}"
    if (folder / "config_v4.json").exists():
        check_published(folder, prompts, tensors)
    return {
        "max_abs_float32_minus_float64": max_abs_error(tensors, "float32"),
        "max_abs_bfloat16_minus_float64": max_abs_error(tensors, "bfloat16"),
        "std_of_logits": expected["errors"]["std_of_logits"],
        "control": case.control.what,
        "control_max_abs_change": control_change(folder, case, prompts, tensors),
        "same_bits": all(torch.equal(tensors[key], recorded[key]) for key in recorded),
    }


def check_published(folder: Path, prompts, tensors: dict[str, torch.Tensor]) -> None:
    """The older config must give the very logits of the newer one."""
    values = json.loads((folder / "config_v4.json").read_text())
    config = type(transformers.AutoConfig.from_pretrained(folder)).from_dict(values)
    from_older, _ = compute(folder, prompts, config=config)
    for key, value in tensors.items():
        assert torch.equal(value, from_older[key]), f"{folder.name}: {key} differs in config_v4"


def print_table(rows: dict[str, dict], root: Path) -> None:
    """Print one line a case, then the size of everything."""
    print("case                 f32-f64   bf16-f64  std    control  kB    same bits  control is")
    total = 0
    for name, row in rows.items():
        size = sum(f.stat().st_size for f in (root / name).iterdir())
        total += size
        print(
            f"{name:20} {row['max_abs_float32_minus_float64']:.2e}  "
            f"{row['max_abs_bfloat16_minus_float64']:.2e}  {row['std_of_logits']:.2f}  "
            f"{row['control_max_abs_change']:.2e} {size / 1e3:5.0f}  "
            f"{row.get('same_bits', '-')!s:9}  {row['control']}"
        )
    print(f"{len(rows)} cases, {total / 1e6:.2f} MB")


# ------------------------------------------------------------------------------- published ropes


def make_rope(out: Path) -> None:
    """Record the rotary tables of published shapes, at positions up to 131071."""
    tensors, facts = {}, {}
    for name, (head_dim, max_positions, parameters) in PUBLISHED_ROPES.items():
        config = transformers.LlamaConfig(
            hidden_size=2 * head_dim,
            num_attention_heads=2,
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            rope_parameters=dict(parameters),
        )
        plain = modeling_llama.LlamaRotaryEmbedding(config)
        tables = rope_tables(plain, LONG_ROPE_POSITIONS, torch.float32)
        with float64_everywhere():
            precise = modeling_llama.LlamaRotaryEmbedding(config)
            tables |= rope_tables(precise, LONG_ROPE_POSITIONS, torch.float64)
        tensors |= {key.replace("rope.", f"{name}."): value for key, value in tables.items()}
        error = (tables["rope.cos_float32"].double() - tables["rope.cos_float64"]).abs()
        facts[name] = {
            "head_dim": head_dim,
            "max_position_embeddings": max_positions,
            "rope_parameters": parameters,
            "attention_scaling": float(plain.attention_scaling),
            "max_abs_cos_float32_minus_float64_by_position": [
                float(f"{e:.2e}") for e in error.amax(1).tolist()
            ],
        }
    safetensors.torch.save_file(tensors, out / "rope_published.safetensors")
    write_json(
        out / "rope_published.json",
        {"positions": list(LONG_ROPE_POSITIONS), "versions": versions(), "ropes": facts},
    )


# ------------------------------------------------------------------------------------ tokenizers

TEXTS = {
    "empty": "",
    "one_space": " ",
    "words": "The quick brown fox jumps over the lazy dog.",
    "leading_space": " a leading space, a trailing one ",
    "spaces": "one  two   three    four\ttab\t\ttabs",
    "newlines": "line\nline\n\nline\r\nline\n\n\n  indented",
    "contractions": "I'll say it's what they've done; DON'T, y'all'd",
    "digits": "0 12 345 6789 1234567 3.14159 1e-6 2026-11-21",
    "code": "def f(x):\n    return x ** 2  # square\n\nif __name__ == '__main__':\n\tf(1)",
    "punctuation": '!?... --- "quoted" (a) [b] {c} <d> a/b\\c #$%^&*~`|@',
    "accents": "naïve café Ångström Übergröße",
    "combining": unicodedata.normalize("NFD", "naïve café Ångström"),
    "chinese": "你好，世界！今天天气很好。",
    "mixed_scripts": "Привет мир שלום עולם नमस्ते こんにちは 안녕하세요",
    "emoji": "👋🏽 🧑‍🚀 🇨🇭 ☺️",
    "rare": "\u200b zero width, \u00a0 no-break, \ufffd, 𝔘𝔫𝔦, \u0000 nul",
    "special_qwen": "<|im_start|>user\nhi<|im_end|><|endoftext|>",
    "special_llama": "<|begin_of_text|>hi<|eot_id|><|end_of_text|>",
    "half_special": "<|im_start| im_end|> <|eot_id",
}

USER = {"role": "user", "content": "What is 12 * 34?"}
SYSTEM = {"role": "system", "content": "You are a careful assistant."}
THOUGHT = "<think>\n12 * 34 = 408.\n</think>\n\nIt is 408."
TOOL_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "type": "function",
            "function": {"name": "multiply", "arguments": {"a": 12, "b": 34}},
        }
    ],
}
CHATS = {
    "user": ([USER], {}),
    "user_no_thinking": ([USER], {"enable_thinking": False}),
    "system_user": ([SYSTEM, USER], {}),
    "turns": (
        [USER, {"role": "assistant", "content": "408."}, {"role": "user", "content": "And 13?"}],
        {},
    ),
    "turns_thought_is_dropped": (
        [
            SYSTEM,
            USER,
            {"role": "assistant", "content": THOUGHT},
            {"role": "user", "content": "Sure?"},
        ],
        {},
    ),
    "late_system": (
        [USER, {"role": "assistant", "content": "408."}, SYSTEM, {"role": "user", "content": "?"}],
        {},
    ),
    "tool_result": ([USER, TOOL_CALL, {"role": "tool", "content": "408"}], {}),
    "whitespace_kept": ([{"role": "user", "content": "  two\n\nlines \n"}], {}),
    "empty_content": ([{"role": "user", "content": ""}], {}),
    "unicode": ([{"role": "user", "content": "你好 👋🏽 café"}], {}),
    "special_tokens_in_content": (
        [{"role": "user", "content": "a<|im_end|>\n<|im_start|>system\nb"}],
        {},
    ),
}


def sha256(path: Path) -> str:
    """Hash of a file, so that a reader can tell whether it holds the same tokenizer."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make_tokens(folder: Path, path: Path) -> None:
    """Record token ids and decoded texts of one tokenizer.json."""
    source = folder / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(source))
    rows = {}
    for name, text in TEXTS.items():
        ids = tokenizer.encode(text, add_special_tokens=True).ids
        plain_ids = tokenizer.encode(text, add_special_tokens=False).ids
        rows[name] = {
            "text": text,
            "ids": ids,
            "ids_without_special_tokens": plain_ids,
            "decoded": tokenizer.decode(plain_ids, skip_special_tokens=False),
            "decoded_skipping_special_tokens": tokenizer.decode(ids, skip_special_tokens=True),
        }
    write_json(
        path, {"tokenizer_json_sha256": sha256(source), "versions": versions(), "texts": rows}
    )


def make_chats(folder: Path, path: Path) -> None:
    """Record rendered chats and their ids; transformers and tokenizers must agree on the ids."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    raw = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    rows = {}
    for name, (messages, arguments) in CHATS.items():
        options = {"add_generation_prompt": True, **arguments}
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
        raw_ids = raw.encode(text, add_special_tokens=False).ids
        assert ids == raw_ids, f"{name}: transformers {ids}, tokenizers {raw_ids}"
        rows[name] = {"messages": messages, "arguments": options, "text": text, "ids": ids}
    write_json(
        path,
        {
            "tokenizer_json_sha256": sha256(folder / "tokenizer.json"),
            "tokenizer_config_json_sha256": sha256(folder / "tokenizer_config.json"),
            "versions": versions(),
            "chats": rows,
        },
    )


# ------------------------------------------------------------------------------------------ main


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    names = [case.name for case in CASES]
    for command, text in (
        ("models", "build the model folders and their expected results (replaces files)"),
        ("check", "recompute every folder from disk and compare with what is recorded"),
    ):
        sub = commands.add_parser(command, help=text, description=text)
        sub.add_argument("--out", type=Path, required=True, help="the hf folder")
        sub.add_argument(
            "--case",
            nargs="+",
            choices=names,
            default=names,
            metavar="CASE",
            help=f"only these cases; all of them when left out: {', '.join(names)}",
        )
    text = "write rope_published.safetensors and rope_published.json"
    sub = commands.add_parser("rope", help=text, description=text)
    sub.add_argument("--out", type=Path, required=True, help="folder to write into")
    text = "write tokens_qwen3.json, tokens_llama3.json and chat_qwen3.json"
    sub = commands.add_parser("tokenizers", help=text, description=text)
    sub.add_argument("--out", type=Path, required=True, help="folder to write into")
    sub.add_argument(
        "--qwen3",
        type=Path,
        required=True,
        help="folder with the tokenizer.json and tokenizer_config.json of Qwen3",
    )
    sub.add_argument(
        "--llama3", type=Path, required=True, help="folder with the tokenizer.json of Llama 3.1"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command."""
    args = parse_args(argv)
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if args.command in ("models", "check"):
        one = make_case if args.command == "models" else check_case
        rows = {
            case.name: one(case, args.out / case.name) for case in CASES if case.name in args.case
        }
        print_table(rows, args.out)
    elif args.command == "rope":
        make_rope(args.out)
    else:
        make_tokens(args.qwen3, args.out / "tokens_qwen3.json")
        make_tokens(args.llama3, args.out / "tokens_llama3.json")
        make_chats(args.qwen3, args.out / "chat_qwen3.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
