# SPDX-License-Identifier: Apache-2.0
"""Choosing a token: biases and penalties, Gumbel-max scores, and the sums behind top-p."""

from detjax.array_types import Array, Float32, Int32, UInt32
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.kernel_table import KERNELS


def adjust_logits(
    logits: Float32[Array, "M v"],
    bias: Float32[Array, "M v"],
    uses: Int32[Array, "M v"],
    factors: tuple[Float32[Array, " M"], Float32[Array, " M"]],
    penalties: tuple[Float32[Array, " M"], Float32[Array, " M"]],
    *,
    backend: Backend,
) -> Float32[Array, "M v"]:
    """Add biases, scale what the text has, and subtract penalties from what the completion has.

    `a = logits + bias`, `b = a * (factors[0] if a > 0 else factors[1])` where `uses > 0`, and
    `out = (b - penalties[0] * (uses - 1)) - penalties[1]` where `uses > 1`

    Args:
        logits: This rank's share of the vocabulary; -inf stays -inf.
        bias: Finite; 0 leaves a logit as it is.
        uses: 0 where the text does not have the token, else 1 and how often the completion has it.
        factors: Above 0, of each row: of logits above 0, and of the others.
        penalties: Of each row: for each use in the completion, and for any.
        backend: Which implementation runs.

    Numerics:
        Elementwise float32, in the order that is written; every product, sum and difference is
        rounded on its own. What is neutral (bias 0, uses 0, factors 1, penalties 0) changes no bit,
        the sign of a zero included.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.

    Reference:
        Repetition penalty: Keskar et al. 2019, arXiv:1909.05858, with its reciprocal rounded before
        it multiplies, as vLLM has it.
    """
    return KERNELS[backend].adjust_logits(logits, bias, uses, factors, penalties)


def gumbel_scores(
    logits: Float32[Array, "M v"],
    temperature: Float32[Array, " M"],
    key: tuple[UInt32[Array, " M"], UInt32[Array, " M"]],
    *,
    first_token_id: int | Int32[Array, ""],
    backend: Backend,
) -> Float32[Array, "M v"]:
    """Score every token so that the first maximum is the sampled one.

    `out[m, v] = logits[m, v] / temperature[m] + noise(key[m], first_token_id + v)`, or the logit
    itself where the temperature is 0.

    Args:
        logits: This rank's share of the vocabulary.
        temperature: 0 is greedy.
        key: Of each row, from `noise.row_key`.
        first_token_id: Token of the first column; a multiple of 128.
        backend: Which implementation runs.

    Numerics:
        Elementwise float32; the noise as `noise` specifies. sm90: a division, then an addition;
        portable: a fused multiply-add of the temperature's rounded reciprocal. A logit of -inf has
        the score -inf. Temperatures are 0 or from 1e-30 to 1e30.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.

    Reference:
        Gumbel-max: Maddison et al. 2014, arXiv:1411.0030.
    """
    return KERNELS[backend].gumbel_scores(logits, temperature, key, first_token_id=first_token_id)


def stats_and_choice(
    logits: Float32[Array, "M v"],
    temperature: Float32[Array, " M"],
    key: tuple[UInt32[Array, " M"], UInt32[Array, " M"]],
    *,
    first_token_id: int | Int32[Array, ""],
    vocab_block: int,
    backend: Backend,
) -> tuple[Float32[Array, "M z"], Float32[Array, "M z"], Float32[Array, " M"], Int32[Array, " M"]]:
    """Block statistics for the log-softmax, and the best score of each row and its token.

    `maxima, sums = block_stats(logits)`, `scores = gumbel_scores(logits, ...)`,
    `best[m] = max(scores[m])`, `token[m] = first_token_id + argmax(scores[m])`

    Args:
        logits: This rank's share of the vocabulary; -inf marks padding.
        temperature: 0 is greedy.
        key: Of each row, from `noise.row_key`.
        first_token_id: Token of the first column; a multiple of 128.
        vocab_block: Logits in a block.
        backend: Which implementation runs.

    Raises:
        ValueError: If the share is not whole blocks.

    Numerics:
        The bits of `block_stats` and `gumbel_scores`; on sm90 in one pass that writes no scores.
        Comparisons are exact; the first maximum wins. With a NaN among a row's logits its
        statistics are NaN and its token is unspecified.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    if logits.shape[1] % vocab_block:
        raise ValueError(f"{logits.shape[1]} logits must be whole blocks of {vocab_block}")
    return KERNELS[backend].stats_and_choice(
        logits, temperature, key, first_token_id=first_token_id, vocab_block=vocab_block
    )


def choose_token(
    logits: Float32[Array, "M V"],
    temperature: Float32[Array, " M"],
    key: tuple[UInt32[Array, " M"], UInt32[Array, " M"]],
    *,
    vocab_block: int,
    backend: Backend,
) -> tuple[Int32[Array, " M"], Float32[Array, " M"], Float32[Array, " M"]]:
    """The token of each row, its log-probability and the log-sum-exp of the row's logits.

    `token[m] = argmax(gumbel_scores(logits, ...)[m])`, `lse = log_sum_exp(*block_stats(logits))`,
    `logprob[m] = logits[m, token[m]] - lse[m]`

    Args:
        logits: The whole vocabulary, on one rank; -inf marks padding.
        temperature: 0 is greedy.
        key: Of each row, from `noise.row_key`.
        vocab_block: Logits in a block.
        backend: Which implementation runs.

    Raises:
        ValueError: If the vocabulary is not whole blocks.

    Numerics:
        The bits of `stats_and_choice`, `log_sum_exp` and `log_probs`; on sm90 in two launches. With
        a NaN among a row's logits its log-probability is NaN and its token is unspecified.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    if logits.shape[1] % vocab_block:
        raise ValueError(f"{logits.shape[1]} logits must be whole blocks of {vocab_block}")
    return KERNELS[backend].choose_token(logits, temperature, key, vocab_block=vocab_block)


def nucleus_sums(
    sorted_logits: Float32[Array, "M V"],
    temperature: Float32[Array, " M"],
    top_k: Int32[Array, " M"],
    top_p: Float32[Array, " M"],
    *,
    backend: Backend,
) -> tuple[Float32[Array, "M V"], Float32[Array, "M V"], Float32[Array, " M"]]:
    """Weights of tokens sorted by logit, the sums before each, and top-p's share of the total.

    `weight[r] = exp((x[r] - x[0]) / temperature)`, `before[r] = sum(weight[:r])` and
    `limit = top_p * sum(weight)`, with both sums over ranks below `top_k` only.

    Args:
        sorted_logits: The whole vocabulary, largest first.
        temperature: 0 counts as 1; a greedy row takes rank 0 whatever is kept.
        top_k: How many ranks may be kept; at least 1.
        top_p: In (0, 1].
        backend: Which implementation runs.

    Numerics:
        float32; chunks of 128 ranks left to right, a scan of fixed shape inside a chunk. The
        quotient is one on sm90, a product with the rounded reciprocal on portable.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.

    Reference:
        Holtzman et al. 2019, arXiv:1904.09751.
    """
    return KERNELS[backend].nucleus_sums(sorted_logits, temperature, top_k, top_p)
