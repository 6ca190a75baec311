"""XLA:GPU's HloRematerialization moves a read of a donated argument behind its in-place update.

XLA_FLAGS=--xla_gpu_memory_limit_slop_factor=0 python rematerialization.py   # prints WRONG, exits 1
python rematerialization.py                                                  # prints right, exits 0

Needs jax 0.11.2 with CUDA and nothing else. The flag stands for a program that takes 0.76 of the
device's memory with its arguments, which is when the pass runs without it.
"""

import sys

import jax
import jax.numpy as jnp


def step(start, x, weights):
    # How many are no larger: a reduction, so a fusion of its own, and cheap to compute again.
    rank = (start[:, None] >= start[None, :]).astype(jnp.int32).sum(axis=1)
    start = start.at[3].set(1000 + rank[3])  # in place, after the reduction
    x = x + start[:, None]
    for w in weights:
        x = jnp.tanh(x @ w)
    return start, x + rank[:, None], rank[:, None] * jnp.ones(x.shape, jnp.int32)


if __name__ == "__main__":
    rows, width = 8, 1024
    operands = (
        jnp.arange(rows, dtype=jnp.int32),
        jnp.ones((rows, width)),
        [jnp.eye(width) * 0.5] * 4,
    )
    want = list(range(1, rows + 1))
    _, _, rank = jax.jit(step, donate_argnums=0)(*operands)
    got = rank[:, 0].tolist()
    print(jax.devices()[0].device_kind, "right" if got == want else f"WRONG: {got}, not {want}")
    sys.exit(got != want)
