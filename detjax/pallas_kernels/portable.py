# SPDX-License-Identifier: Apache-2.0
"""The kernel set of generic Pallas in fixed blocks, interpreted on a CPU. A `KernelSet`."""

from detjax.pallas_kernels.attention.portable import attention as attention
from detjax.pallas_kernels.attention.portable import rope_attention as rope_attention
from detjax.pallas_kernels.delta_rule.portable import delta_rule as delta_rule
from detjax.pallas_kernels.delta_rule.portable import delta_rule_gradient as delta_rule_gradient
from detjax.pallas_kernels.delta_rule.portable import gated_rms_norm as gated_rms_norm
from detjax.pallas_kernels.embedding.portable import embed as embed
from detjax.pallas_kernels.geglu.portable import geglu as geglu
from detjax.pallas_kernels.gradients.portable import attention_gradient as attention_gradient
from detjax.pallas_kernels.gradients.portable import expert_token_sum as expert_token_sum
from detjax.pallas_kernels.gradients.portable import token_sum as token_sum
from detjax.pallas_kernels.linear.portable import add_partials as add_partials
from detjax.pallas_kernels.linear.portable import combine_norm_linear as combine_norm_linear
from detjax.pallas_kernels.linear.portable import defers_norm as defers_norm
from detjax.pallas_kernels.linear.portable import defers_sum as defers_sum
from detjax.pallas_kernels.linear.portable import joins_matrices as joins_matrices
from detjax.pallas_kernels.linear.portable import linear as linear
from detjax.pallas_kernels.linear.portable import linear_add as linear_add
from detjax.pallas_kernels.linear.portable import linear_add_rms_norm as linear_add_rms_norm
from detjax.pallas_kernels.linear.portable import linear_leaf_sums as linear_leaf_sums
from detjax.pallas_kernels.linear.portable import linear_partial as linear_partial
from detjax.pallas_kernels.linear.portable import linear_swiglu as linear_swiglu
from detjax.pallas_kernels.linear.portable import norm_linear as norm_linear
from detjax.pallas_kernels.linear.portable import norm_linear_swiglu as norm_linear_swiglu
from detjax.pallas_kernels.linear.portable_w8a8 import quantize_rows as quantize_rows
from detjax.pallas_kernels.linear.portable_w8a8 import w8a8_product as w8a8_product
from detjax.pallas_kernels.linear.portable_w8a8 import w8a8_swiglu as w8a8_swiglu
from detjax.pallas_kernels.log_softmax.portable import block_stats as block_stats
from detjax.pallas_kernels.log_softmax.portable import log_probs as log_probs
from detjax.pallas_kernels.log_softmax.portable import log_sum_exp as log_sum_exp
from detjax.pallas_kernels.lora.portable import expert_lora_add as expert_lora_add
from detjax.pallas_kernels.lora.portable import lora_add as lora_add
from detjax.pallas_kernels.lora.portable import lora_hidden as lora_hidden
from detjax.pallas_kernels.lora.portable import lora_linear as lora_linear
from detjax.pallas_kernels.lora.portable import (
    lora_linear_add_rms_norm as lora_linear_add_rms_norm,
)
from detjax.pallas_kernels.lora.portable import lora_linear_swiglu as lora_linear_swiglu
from detjax.pallas_kernels.lora.portable import lora_project as lora_project
from detjax.pallas_kernels.moe.portable import (
    combine_experts_add_rms_norm as combine_experts_add_rms_norm,
)
from detjax.pallas_kernels.moe.portable import (
    combine_experts_norm_linear as combine_experts_norm_linear,
)
from detjax.pallas_kernels.moe.portable import defers_experts as defers_experts
from detjax.pallas_kernels.moe.portable import expert_linear as expert_linear
from detjax.pallas_kernels.moe.portable import expert_mlp as expert_mlp
from detjax.pallas_kernels.moe.portable import joins_experts as joins_experts
from detjax.pallas_kernels.moe.portable import route as route
from detjax.pallas_kernels.moe.portable import route_by_sigmoid as route_by_sigmoid
from detjax.pallas_kernels.moe.portable import route_mlp as route_mlp
from detjax.pallas_kernels.moe.portable import route_mlp_add_rms_norm as route_mlp_add_rms_norm
from detjax.pallas_kernels.output_gate.portable import sigmoid_gate as sigmoid_gate
from detjax.pallas_kernels.rms_norm.portable import add_rms_norm as add_rms_norm
from detjax.pallas_kernels.rms_norm.portable import combine_add_rms_norm as combine_add_rms_norm
from detjax.pallas_kernels.rms_norm.portable import rms_norm as rms_norm
from detjax.pallas_kernels.rope.portable import rope as rope
from detjax.pallas_kernels.rope.portable import rope_into_cache as rope_into_cache
from detjax.pallas_kernels.sampling.portable import adjust_logits as adjust_logits
from detjax.pallas_kernels.sampling.portable import choose_token as choose_token
from detjax.pallas_kernels.sampling.portable import gumbel_scores as gumbel_scores
from detjax.pallas_kernels.sampling.portable import nucleus_sums as nucleus_sums
from detjax.pallas_kernels.sampling.portable import stats_and_choice as stats_and_choice
from detjax.pallas_kernels.softcap.portable import softcap as softcap
from detjax.pallas_kernels.swiglu.portable import swiglu as swiglu

takes_every_model = True
attention_beats_xla = False
steps_beat_xla = False
reads_codes = False
adapted_dtypes: tuple[str, ...] = ("bfloat16", "float32")
why_no_expert_adapters = ""


def why_not_here() -> str | None:
    """Every machine has a CPU."""
    return None


def what_to_install() -> str | None:
    """Nothing."""
    return None


def where_it_runs() -> str:
    """On the CPU, whatever else there is."""
    return "runs on the CPU"
