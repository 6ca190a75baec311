# SPDX-License-Identifier: Apache-2.0
"""Log-softmax of logits that are split over ranks: block sums here, one tree everywhere."""

from detjax.array_types import Array, Float32
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.kernel_table import KERNELS


def block_stats(
    logits: Float32[Array, "M v"], *, vocab_block: int, backend: Backend
) -> tuple[Float32[Array, "M z"], Float32[Array, "M z"]]:
    """Maximum and sum of exponentials of each block of the vocabulary.

    `maxima[m, z] = max(logits[m, block z])`, `sums[m, z] = sum(exp(logits - maxima[m, z]))`

    Args:
        logits: This rank's share of the vocabulary; -inf marks padding.
        vocab_block: Logits of a block; `profile.vocab_block`.
        backend: Which implementation runs.

    Raises:
        ValueError: If the share is not whole blocks.

    Numerics:
        One float32 row sum of fixed shape a block. A block of padding gives (-inf, 0).
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    if logits.shape[1] % vocab_block:
        raise ValueError(f"{logits.shape[1]} logits must be whole blocks of {vocab_block}")
    return KERNELS[backend].block_stats(logits, vocab_block=vocab_block)


def log_sum_exp(
    maxima: Float32[Array, "M Z"], sums: Float32[Array, "M Z"], *, backend: Backend
) -> Float32[Array, " M"]:
    """Combine the blocks of the whole vocabulary.

    `m = max(maxima)`, `out = m + log(tree(sums[z] * exp(maxima[z] - m) for z in blocks))`

    Args:
        maxima: Of every rank, in vocabulary order.
        sums: Likewise.
        backend: Which implementation runs.

    Numerics:
        float32; a perfect binary tree over blocks in vocabulary order. Blocks of padding add exact
        zeros at the end, so how far a mesh pads the vocabulary does not matter.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    return KERNELS[backend].log_sum_exp(maxima, sums)


def log_probs(
    logits: Float32[Array, "M X"], lse: Float32[Array, " M"], *, backend: Backend
) -> Float32[Array, "M X"]:
    """Log-probabilities of chosen logits.

    `out[m, x] = logits[m, x] - lse[m]`

    Numerics:
        One float32 subtraction an element.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    return KERNELS[backend].log_probs(logits, lse)
