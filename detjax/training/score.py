# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of given sequences under a serving model on its mesh. No gradients."""

import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from detjax.array_types import Array, Float32, Int32
from detjax.compilation.xla_flags import EXACT_OPTIONS, FAST_OPTIONS
from detjax.engine.running.device_arrays import PAGES_SPEC, empty_pages
from detjax.interpreter_exit import finishes_before_exit
from detjax.models.forward_paths import FORWARD_PATHS, KernelMode
from detjax.models.layers import ForwardContext, Tokens
from detjax.models.loading import LoadedModel
from detjax.pallas_kernels.log_softmax.api import block_stats, log_probs, log_sum_exp
from detjax.parallel.collectives import gather_columns
from detjax.parallel.dispatch import OrderedJit
from detjax.parallel.mesh import DP_AXIS, TP_AXIS


class Scorer:
    """A compiled scoring step; one program for each number of sequences and length."""

    @finishes_before_exit
    def __init__(self, model: LoadedModel, *, mode: KernelMode = "invariant"):
        """Score with a model on its mesh.

        Args:
            model: On any (dp, tp) mesh.
            mode: `invariant`: canonical kernels. `fast`: XLA's, without a claim, to compare.

        Raises:
            ValueError: If `mode` is neither.
        """
        if mode not in FORWARD_PATHS:
            raise ValueError(f"{mode=} must be one of {list(FORWARD_PATHS)}")
        self._model = model
        self._forward, self._local_logits = FORWARD_PATHS[mode]
        by_row = P(DP_AXIS)
        step = jax.jit(
            jax.shard_map(
                self._local_step,
                mesh=model.mesh,
                in_specs=(model.partition_specs, P(), PAGES_SPEC, by_row, by_row),
                out_specs=by_row,
                check_vma=False,
            ),
            compiler_options=EXACT_OPTIONS if mode == "invariant" else FAST_OPTIONS,
        )
        self._step = OrderedJit(step)

    @finishes_before_exit
    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Return the log-probability of every token after the first of each sequence, float32.

        Raises:
            ValueError: If a sequence has fewer than two tokens, is longer than the context, or has
                a token id that is not in the vocabulary.

        Numerics:
            Claims in mode `invariant`: run-invariant, batch-invariant, path-consistent,
            mesh-invariant. The bits that the engine reports when it samples these tokens.
        """
        model, dp = self._model, self._model.mesh.shape[DP_AXIS]
        context = model.config.max_position_embeddings
        for i, sequence in enumerate(sequences):
            if not 2 <= len(sequence) <= context:
                raise ValueError(
                    f"sequence {i} has {len(sequence)} tokens; give 2 to the model's {context}"
                )
            for token_id in sequence:
                if not 0 <= operator.index(token_id) < model.config.vocab_size:
                    raise ValueError(
                        f"sequence {i} has token id {token_id}; the model's vocabulary is 0 to "
                        f"{model.config.vocab_size - 1}"
                    )
        if not sequences:
            return []
        num_rows = -(-len(sequences) // dp) * dp
        length = max(len(sequence) for sequence in sequences) - 1
        ids = np.zeros((num_rows, length), np.int32)
        targets, positions = ids.copy(), np.full_like(ids, -1)
        for row, sequence in enumerate(sequences):
            count = len(sequence) - 1
            ids[row, :count], targets[row, :count] = sequence[:-1], sequence[1:]
            positions[row, :count] = np.arange(count)
        blocks = -(-length // model.profile.attention_block)
        # A replica counts its own pages from 0.
        table = np.arange(num_rows * blocks, dtype=np.int32).reshape(num_rows, blocks)
        table %= num_rows // dp * blocks
        pages = empty_pages(model, num_rows * blocks)
        tokens = Tokens(ids=ids, positions=positions, page_table=table)
        out = self._step(model.params, model.rope_tables, pages, tokens, targets)
        found = np.asarray(out)
        return [found[row, : len(s) - 1] for row, s in enumerate(sequences)]

    def _local_step(
        self, params, rope_tables, pages, tokens: Tokens, targets: Int32[Array, "B T"]
    ) -> Float32[Array, "B T"]:
        model = self._model
        ctx = ForwardContext(
            config=model.config,
            profile=model.profile,
            backend=model.backend,
            tp=model.mesh.shape[TP_AXIS],
        )
        _, hidden = self._forward(ctx, params, rope_tables, pages, tokens)
        logits = self._local_logits(ctx, params, hidden.reshape(-1, hidden.shape[-1]))
        stats = block_stats(logits, vocab_block=model.profile.vocab_block, backend=ctx.backend)
        gathered = (gather_columns(stat, TP_AXIS) for stat in stats)
        lse = log_sum_exp(*gathered, backend=ctx.backend)
        chosen = self._of_targets(logits, targets.reshape(-1))
        return log_probs(chosen, lse, backend=ctx.backend).reshape(targets.shape)

    def _of_targets(
        self, logits: Float32[Array, "M v"], targets: Int32[Array, " M"]
    ) -> Float32[Array, "M 1"]:
        """Each row's logit of its target, from the rank that has it."""
        width = logits.shape[1]
        local = targets - lax.axis_index(TP_AXIS) * width
        mine = jnp.take_along_axis(logits, jnp.clip(local, 0, width - 1)[:, None], axis=1)
        return jnp.take_along_axis(
            gather_columns(mine, TP_AXIS), (targets // width)[:, None], axis=1
        )
