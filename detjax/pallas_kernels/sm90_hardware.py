# SPDX-License-Identifier: Apache-2.0
"""What a Hopper GPU has. Imports nothing, so that choices of tiles start no JAX."""

NUM_SMS = 132
"""Streaming multiprocessors of an H100 or H200 SXM: the CTAs of a persistent grid."""

SMEM_BYTES = 232448
"""Shared memory one CTA may have on sm_90."""

LANES = 128
"""Threads of a warpgroup."""

SPAN = 64
"""Channels of bfloat16 that are one swizzle span: 128 bytes, in 8 chunks of 8 channels."""

WARP = 32
"""Threads of a warp."""
