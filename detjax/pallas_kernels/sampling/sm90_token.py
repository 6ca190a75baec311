# SPDX-License-Identifier: Apache-2.0
"""The token of each row and its log-probability on Hopper, where one rank has the vocabulary."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from detjax.pallas_kernels import sm90_rows as rows
from detjax.pallas_kernels.log_softmax.sm90 import LOGIT_BLOCK, ROW_SCRATCH, row_log_sum_exp
from detjax.pallas_kernels.sampling.sm90_choice import (
    MERGE_SCRATCH,
    ScoredParts,
    best_of_parts,
    merge_row,
)


@functools.partial(jax.jit, static_argnames=("vocab_block", "interpret"))
def choose_token(
    logits, temperature, key, *, vocab_block: int, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `api.choose_token`: one pass over the logits, then a CTA a row.

    Raises:
        ValueError: If the vocabulary is not whole blocks of 128, or a block is another.

    Numerics:
        The bits of `stats_and_choice`, `log_sum_exp` and `log_probs`: the same functions on the
        same layouts, and one rounded float32 subtraction.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    if vocab_block != LOGIT_BLOCK:
        raise ValueError(f"sm90 sampling has blocks of {LOGIT_BLOCK} logits, not {vocab_block}")
    parts = best_of_parts(logits, temperature, key, 0, interpret=interpret)
    num_rows, width = logits.shape

    def body(parts: ScoredParts, logits_gmem, chosen_gmem, lse_gmem, of_merge, of_sum):
        row = lax.axis_index("row")
        _, token = merge_row(parts.values.at[row], parts.tokens.at[row], of_merge, interpret)
        # No token is chosen of a row of NaN.
        logit = logits_gmem[row, jnp.minimum(token, width - 1)]
        lse = row_log_sum_exp(parts.maxima.at[row], parts.sums.at[row], of_sum, interpret)
        chosen_gmem[row, 0], lse_gmem[row] = token, lse
        chosen_gmem[row, 1] = lax.bitcast_convert_type(logit - lse, jnp.int32)

    # WHY: token and bits of the log-probability side by side, as the host reads them
    # (`serving.launch_operands.pack_choice`): XLA then needs no launch to join them.
    chosen, lse = rows.run_kernel(
        body,
        (parts, logits),
        out=[
            jax.ShapeDtypeStruct((num_rows, 2), jnp.int32),
            jax.ShapeDtypeStruct((num_rows,), jnp.float32),
        ],
        grid={"row": num_rows},
        name="detjax_choose_token",
        is_interpreted=interpret,
        scratch_types=[MERGE_SCRATCH, ROW_SCRATCH],
    )
    return chosen[:, 0], lax.bitcast_convert_type(chosen[:, 1], jnp.float32), lse
