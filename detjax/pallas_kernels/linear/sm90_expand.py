# SPDX-License-Identifier: Apache-2.0
"""A quantised matrix on Hopper as the bfloat16 matrix that it stands for.

Products of many rows read that. They are bound by the tensor core, so that a pass that writes their
weights costs little.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from detjax.pallas_kernels.linear.quantized import BLOCK, QuantizedMatrix
from detjax.pallas_kernels.linear.sm90_sums import COMPILER_PARAMS, tiled
from detjax.pallas_kernels.linear.sm90_widen import ROW_LAYOUT, widen, words_layout

MOST_BLOCKS = 4
"""Blocks of 64 x 64 weights of a CTA."""


@functools.partial(jax.jit, static_argnames=("interpret",))
def expand(w: QuantizedMatrix, *, interpret=None) -> jax.Array:
    """The bfloat16 matrix [N, K] of a quantised one.

    Numerics:
        # ROUND: as `linear.quantized`; no sums.
    """
    num_rows, num_columns = w.shape
    coding = w.coding
    num_blocks = next(n for n in range(MOST_BLOCKS, 0, -1) if num_columns // BLOCK % n == 0)

    def load_groups(ref, rows, column):
        first = lax.div(column, coding.group_len) if coding.group_len else 0
        return [
            plgpu.load(ref.at[first + i, rows], layout=ROW_LAYOUT, optimized=False)
            for i in range(coding.groups_of(BLOCK))
        ]

    def body(
        w_gmem,  # QuantizedMatrix
        out_gmem,  # [N, K]
        out_smem,  # [blocks, 64, 64]
    ):
        row_block = lax.axis_index("row")
        rows = pl.ds(row_block * BLOCK, BLOCK)
        first = lax.axis_index("column") * num_blocks
        layout = words_layout(coding.code_type)
        blocks = [
            plgpu.load(w_gmem.codes.at[row_block, first + i], layout=layout, optimized=False)
            for i in range(num_blocks)
        ]
        for i, words in enumerate(blocks):
            column = (first + i) * BLOCK
            out_smem[i] = widen(
                words,
                load_groups(w_gmem.scales, rows, column),
                load_groups(w_gmem.zeros, rows, column) if coding.has_zeros else [],
                coding,
                is_interpreted=interpret is not None,
            )
        plgpu.commit_smem()
        for i in range(num_blocks):
            columns = pl.ds((first + i) * BLOCK, BLOCK)
            plgpu.copy_smem_to_gmem(out_smem.at[i], out_gmem.at[rows, columns])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_rows, num_columns), jnp.bfloat16),
        scratch_types=[
            plgpu.SMEM(
                (num_blocks, BLOCK, BLOCK), jnp.bfloat16, transforms=tiled(BLOCK, jnp.bfloat16)
            )
        ],
        grid=(num_rows // BLOCK, num_columns // BLOCK // num_blocks),
        grid_names=("row", "column"),
        compiler_params=COMPILER_PARAMS,
        kernel_name="detjax_expand",
        interpret=interpret,
    )(w)
