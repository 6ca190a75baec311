# SPDX-License-Identifier: Apache-2.0
"""The kernel set of the bits of Hopper GPUs, in C++ on a CPU. A `KernelSet`."""

from detjax.pallas_kernels.attention.reference import attention as attention
from detjax.pallas_kernels.attention.reference import rope_attention as rope_attention
from detjax.pallas_kernels.delta_rule.reference import delta_rule as delta_rule
from detjax.pallas_kernels.delta_rule.reference import delta_rule_gradient as delta_rule_gradient
from detjax.pallas_kernels.delta_rule.reference import gated_rms_norm as gated_rms_norm
from detjax.pallas_kernels.embedding.reference import embed as embed
from detjax.pallas_kernels.geglu.reference import geglu as geglu
from detjax.pallas_kernels.gradients.reference import attention_gradient as attention_gradient
from detjax.pallas_kernels.gradients.reference import expert_token_sum as expert_token_sum
from detjax.pallas_kernels.gradients.reference import token_sum as token_sum
from detjax.pallas_kernels.linear.portable import defers_norm as defers_norm
from detjax.pallas_kernels.linear.portable import defers_sum as defers_sum
from detjax.pallas_kernels.linear.portable import joins_matrices as joins_matrices
from detjax.pallas_kernels.linear.reference import add_partials as add_partials
from detjax.pallas_kernels.linear.reference import combine_norm_linear as combine_norm_linear
from detjax.pallas_kernels.linear.reference import linear as linear
from detjax.pallas_kernels.linear.reference import linear_add as linear_add
from detjax.pallas_kernels.linear.reference import linear_add_rms_norm as linear_add_rms_norm
from detjax.pallas_kernels.linear.reference import linear_leaf_sums as linear_leaf_sums
from detjax.pallas_kernels.linear.reference import linear_partial as linear_partial
from detjax.pallas_kernels.linear.reference import linear_swiglu as linear_swiglu
from detjax.pallas_kernels.linear.reference import norm_linear as norm_linear
from detjax.pallas_kernels.linear.reference import norm_linear_swiglu as norm_linear_swiglu
from detjax.pallas_kernels.linear.reference import quantize_rows as quantize_rows
from detjax.pallas_kernels.linear.reference import w8a8_product as w8a8_product
from detjax.pallas_kernels.linear.reference import w8a8_swiglu as w8a8_swiglu
from detjax.pallas_kernels.log_softmax.reference import block_stats as block_stats
from detjax.pallas_kernels.log_softmax.reference import log_probs as log_probs
from detjax.pallas_kernels.log_softmax.reference import log_sum_exp as log_sum_exp
from detjax.pallas_kernels.lora.reference import expert_lora_add as expert_lora_add
from detjax.pallas_kernels.lora.reference import lora_add as lora_add
from detjax.pallas_kernels.lora.reference import lora_hidden as lora_hidden
from detjax.pallas_kernels.lora.reference import lora_linear as lora_linear
from detjax.pallas_kernels.lora.reference import (
    lora_linear_add_rms_norm as lora_linear_add_rms_norm,
)
from detjax.pallas_kernels.lora.reference import lora_linear_swiglu as lora_linear_swiglu
from detjax.pallas_kernels.lora.reference import lora_project as lora_project
from detjax.pallas_kernels.moe.portable import joins_experts as joins_experts
from detjax.pallas_kernels.moe.reference import (
    combine_experts_add_rms_norm as combine_experts_add_rms_norm,
)
from detjax.pallas_kernels.moe.reference import (
    combine_experts_norm_linear as combine_experts_norm_linear,
)
from detjax.pallas_kernels.moe.reference import defers_experts as defers_experts
from detjax.pallas_kernels.moe.reference import expert_linear as expert_linear
from detjax.pallas_kernels.moe.reference import expert_mlp as expert_mlp
from detjax.pallas_kernels.moe.reference import route as route
from detjax.pallas_kernels.moe.reference import route_by_sigmoid as route_by_sigmoid
from detjax.pallas_kernels.moe.reference import route_mlp as route_mlp
from detjax.pallas_kernels.moe.reference import route_mlp_add_rms_norm as route_mlp_add_rms_norm
from detjax.pallas_kernels.output_gate.reference import sigmoid_gate as sigmoid_gate
from detjax.pallas_kernels.reference_library import library
from detjax.pallas_kernels.rms_norm.reference import add_rms_norm as add_rms_norm
from detjax.pallas_kernels.rms_norm.reference import combine_add_rms_norm as combine_add_rms_norm
from detjax.pallas_kernels.rms_norm.reference import rms_norm as rms_norm
from detjax.pallas_kernels.rope.reference import rope as rope
from detjax.pallas_kernels.rope.reference import rope_into_cache as rope_into_cache
from detjax.pallas_kernels.sampling.reference import adjust_logits as adjust_logits
from detjax.pallas_kernels.sampling.reference import choose_token as choose_token
from detjax.pallas_kernels.sampling.reference import gumbel_scores as gumbel_scores
from detjax.pallas_kernels.sampling.reference import nucleus_sums as nucleus_sums
from detjax.pallas_kernels.sampling.reference import stats_and_choice as stats_and_choice
from detjax.pallas_kernels.softcap.reference import softcap as softcap
from detjax.pallas_kernels.swiglu.reference import swiglu as swiglu

takes_every_model = False
attention_beats_xla = False
steps_beat_xla = False
reads_codes = False
adapted_dtypes: tuple[str, ...] = ("bfloat16",)
why_no_expert_adapters = ""


def why_not_here() -> str | None:
    """Every machine has a CPU."""
    return None


def what_to_install() -> str | None:
    """A C++ compiler, once."""
    try:
        library()
    except (OSError, RuntimeError) as error:
        return str(error)
    return None


def where_it_runs() -> str:
    """On the CPU, whatever else there is."""
    return "runs on the CPU, in the bits of a Hopper GPU"
