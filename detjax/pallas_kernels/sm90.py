# SPDX-License-Identifier: Apache-2.0
"""The kernel set of Hopper GPUs: TMA, wgmma, warp specialisation. A `KernelSet`."""

import jax

from detjax.pallas_kernels.attention.sm90 import attention as attention
from detjax.pallas_kernels.attention.sm90 import rope_attention as rope_attention
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.delta_rule.sm90 import delta_rule as delta_rule
from detjax.pallas_kernels.delta_rule.sm90 import delta_rule_gradient as delta_rule_gradient
from detjax.pallas_kernels.delta_rule.sm90 import gated_rms_norm as gated_rms_norm
from detjax.pallas_kernels.embedding.portable import embed as embed
from detjax.pallas_kernels.geglu.sm90 import geglu as geglu
from detjax.pallas_kernels.gradients.sm90 import attention_gradient as attention_gradient
from detjax.pallas_kernels.gradients.sm90 import expert_token_sum as expert_token_sum
from detjax.pallas_kernels.gradients.sm90 import token_sum as token_sum
from detjax.pallas_kernels.linear.sm90 import add_partials as add_partials
from detjax.pallas_kernels.linear.sm90 import combine_norm_linear as combine_norm_linear
from detjax.pallas_kernels.linear.sm90 import defers_norm as defers_norm
from detjax.pallas_kernels.linear.sm90 import defers_sum as defers_sum
from detjax.pallas_kernels.linear.sm90 import joins_matrices as joins_matrices
from detjax.pallas_kernels.linear.sm90 import linear as linear
from detjax.pallas_kernels.linear.sm90 import linear_add as linear_add
from detjax.pallas_kernels.linear.sm90 import linear_add_rms_norm as linear_add_rms_norm
from detjax.pallas_kernels.linear.sm90 import linear_leaf_sums as linear_leaf_sums
from detjax.pallas_kernels.linear.sm90 import linear_partial as linear_partial
from detjax.pallas_kernels.linear.sm90 import linear_swiglu as linear_swiglu
from detjax.pallas_kernels.linear.sm90 import norm_linear as norm_linear
from detjax.pallas_kernels.linear.sm90 import norm_linear_swiglu as norm_linear_swiglu
from detjax.pallas_kernels.linear.sm90_quantize_rows import quantize_rows as quantize_rows
from detjax.pallas_kernels.linear.sm90_w8a8 import w8a8_product as w8a8_product
from detjax.pallas_kernels.linear.sm90_w8a8 import w8a8_swiglu as w8a8_swiglu
from detjax.pallas_kernels.log_softmax.sm90 import block_stats as block_stats
from detjax.pallas_kernels.log_softmax.sm90 import log_probs as log_probs
from detjax.pallas_kernels.log_softmax.sm90 import log_sum_exp as log_sum_exp
from detjax.pallas_kernels.lora.sm90 import expert_lora_add as expert_lora_add
from detjax.pallas_kernels.lora.sm90 import lora_add as lora_add
from detjax.pallas_kernels.lora.sm90 import lora_hidden as lora_hidden
from detjax.pallas_kernels.lora.sm90 import lora_linear as lora_linear
from detjax.pallas_kernels.lora.sm90 import (
    lora_linear_add_rms_norm as lora_linear_add_rms_norm,
)
from detjax.pallas_kernels.lora.sm90 import lora_linear_swiglu as lora_linear_swiglu
from detjax.pallas_kernels.lora.sm90 import lora_project as lora_project
from detjax.pallas_kernels.moe.sm90 import (
    combine_experts_add_rms_norm as combine_experts_add_rms_norm,
)
from detjax.pallas_kernels.moe.sm90 import (
    combine_experts_norm_linear as combine_experts_norm_linear,
)
from detjax.pallas_kernels.moe.sm90 import defers_experts as defers_experts
from detjax.pallas_kernels.moe.sm90 import expert_linear as expert_linear
from detjax.pallas_kernels.moe.sm90 import expert_mlp as expert_mlp
from detjax.pallas_kernels.moe.sm90 import joins_experts as joins_experts
from detjax.pallas_kernels.moe.sm90 import route as route
from detjax.pallas_kernels.moe.sm90 import route_mlp as route_mlp
from detjax.pallas_kernels.moe.sm90 import route_mlp_add_rms_norm as route_mlp_add_rms_norm
from detjax.pallas_kernels.moe.sm90_route_sigmoid import route_by_sigmoid as route_by_sigmoid
from detjax.pallas_kernels.output_gate.sm90 import sigmoid_gate as sigmoid_gate
from detjax.pallas_kernels.rms_norm.sm90 import add_rms_norm as add_rms_norm
from detjax.pallas_kernels.rms_norm.sm90 import combine_add_rms_norm as combine_add_rms_norm
from detjax.pallas_kernels.rms_norm.sm90 import rms_norm as rms_norm
from detjax.pallas_kernels.rope.sm90 import rope as rope
from detjax.pallas_kernels.rope.sm90 import rope_into_cache as rope_into_cache
from detjax.pallas_kernels.sampling.sm90 import adjust_logits as adjust_logits
from detjax.pallas_kernels.sampling.sm90 import gumbel_scores as gumbel_scores
from detjax.pallas_kernels.sampling.sm90 import nucleus_sums as nucleus_sums
from detjax.pallas_kernels.sampling.sm90_choice import stats_and_choice as stats_and_choice
from detjax.pallas_kernels.sampling.sm90_token import choose_token as choose_token
from detjax.pallas_kernels.sm90_here import why_not_here as why_not_here
from detjax.pallas_kernels.softcap.sm90 import softcap as softcap
from detjax.pallas_kernels.swiglu.sm90 import swiglu as swiglu

takes_every_model = False
attention_beats_xla = True  # docs/kernels.md
steps_beat_xla = True  # docs/serving.md
reads_codes = True
adapted_dtypes: tuple[str, ...] = ("bfloat16",)
why_no_expert_adapters = "its products of experts are rounded before an adapter can be added"


def what_to_install() -> str | None:
    """Nothing that this could find."""
    return None


def where_it_runs() -> str:
    """On the first GPU."""
    return f"{jax.devices(Backend.SM90.platform)[0].device_kind} is a Hopper GPU"
