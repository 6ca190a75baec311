# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of a prompt's own tokens, on the device and as the host reads them.

The hidden states of a prefill become logits a few rows at a time, so memory does not grow with the
chunk.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax

from detjax.array_types import Activation, Array, Int32
from detjax.engine.outputs.request_output import PromptLogprob
from detjax.engine.sampling.sampling import most_likely
from detjax.models.layers import ForwardContext
from detjax.pallas_kernels.log_softmax.api import block_stats, log_probs, log_sum_exp
from detjax.parallel.collectives import gather_columns
from detjax.parallel.mesh import TP_AXIS

HEAD_ROWS = 256
"""Tokens whose logits exist at the same time: 125 MiB of a vocabulary of 128 thousand."""


def num_columns(num_top: int) -> int:
    """Numbers that are told of a token."""
    return 2 + 2 * num_top


def score_tokens(
    ctx: ForwardContext,
    local_logits: Callable,
    params: dict,
    hidden: Activation[Array, "B T D"],
    targets: Int32[Array, "B T"],
    *,
    num_top: int,
) -> Int32[Array, "B X"]:
    """Log-probability and rank of the token that follows each token, inside `shard_map`.

    Args:
        ctx: The model, the profile and the mesh.
        local_logits: Of `models.forward_paths`.
        params: This rank's weights.
        hidden: Final normalised hidden states.
        targets: The token that follows each; any where none does.
        num_top: How many of the most likely tokens to report.

    Returns:
        For each token `num_columns` numbers: the bits of the logprob, the rank, the ids of the most
        likely tokens, the bits of their logprobs. X is T times as many.

    Numerics:
        The kernels of `sampling.choose` on the same logits, so the bits of a token's logprob are
        those that it has when it is sampled. The rest compares, counts and copies.
    """
    batch, length, width = hidden.shape
    rows, targets = hidden.reshape(-1, width), targets.reshape(-1)
    num_rows = batch * length

    def score(block):
        return _score_rows(ctx, local_logits(ctx, params, block[0]), block[1], num_top)

    if num_rows <= HEAD_ROWS:
        found = score((rows, targets))
    else:
        missing = -num_rows % HEAD_ROWS
        rows, targets = jnp.pad(rows, ((0, missing), (0, 0))), jnp.pad(targets, (0, missing))
        blocks = rows.reshape(-1, HEAD_ROWS, width), targets.reshape(-1, HEAD_ROWS)
        found = lax.map(score, blocks).reshape(-1, num_columns(num_top))[:num_rows]
    return found.reshape(batch, -1)


def _score_rows(ctx: ForwardContext, logits, targets, num_top: int) -> Int32[Array, "M n"]:
    """The numbers of each row of this rank's logits."""
    backend, width = ctx.backend, logits.shape[1]
    first = lax.axis_index(TP_AXIS) * width
    stats = block_stats(logits, vocab_block=ctx.profile.vocab_block, backend=backend)
    lse = log_sum_exp(*(gather_columns(stat, TP_AXIS) for stat in stats), backend=backend)
    local = jnp.clip(targets - first, 0, width - 1)[:, None]
    owned = gather_columns(jnp.take_along_axis(logits, local, axis=1), TP_AXIS)
    wanted = jnp.take_along_axis(owned, (targets // width)[:, None], axis=1)
    token_ids = first + jnp.arange(width, dtype=jnp.int32)[None, :]
    # Equal logits rank in order of their token ids, as greedy decoding and the top tokens have it.
    is_before = (logits > wanted) | ((logits == wanted) & (token_ids < targets[:, None]))
    counts = jnp.sum(is_before, axis=1, dtype=jnp.int32)[:, None]
    rank = 1 + jnp.sum(gather_columns(counts, TP_AXIS), axis=1, dtype=jnp.int32)
    top_values, top_ids = most_likely(logits, first, num_top)
    logprobs = log_probs(jnp.concatenate([wanted, top_values], axis=1), lse, backend=backend)
    bits = lax.bitcast_convert_type(logprobs, jnp.int32)
    return jnp.concatenate([bits[:, :1], rank[:, None], top_ids, bits[:, 1:]], axis=1)


def read_scores(packed: np.ndarray, *, num_top: int, most: int) -> list[PromptLogprob]:
    """Read what `score_tokens` told of some tokens of one row, on the host.

    Args:
        packed: int32 [T * num_columns], of those tokens.
        num_top: How many of the most likely tokens the program reported.
        most: How many of them the request wants.
    """
    numbers = packed.reshape(-1, num_columns(num_top))
    values = np.ascontiguousarray(numbers).view(np.float32)
    ids, at = numbers[:, 2 : 2 + most].tolist(), 2 + num_top
    return [
        PromptLogprob(row[0], rank, tuple(zip(top, row[at : at + most], strict=True)))
        for row, rank, top in zip(values, numbers[:, 1].tolist(), ids, strict=True)
    ]
