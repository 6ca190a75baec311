# SPDX-License-Identifier: Apache-2.0
"""The fault that the claims rule out: an order of addition that follows the launch.

A product that is tuned by its shape has this fault on some machines. The orders here are written
out, so the controls fail on every machine.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax.models.decoder
import detjax.models.layers

PRODUCTS = {
    "linear": (0, 1), "linear_swiglu": (0, 1), "norm_linear": (0, 1, 2),
    "norm_linear_swiglu": (0, 1, 2),
}  # fmt: skip
"""Products of a model, and which of their arguments have K as the last axis."""


def order_by_company(monkeypatch: pytest.MonkeyPatch, *, canonical_rows: int) -> None:
    """Add over K in an order that follows the number of rows and the other rows.

    Args:
        monkeypatch: Of the test. Programs that are traced later have the fault.
        canonical_rows: A launch of so many rows keeps the canonical order. Any other adds in a
            permutation of K of its own, forwards or backwards by one bit of all its rows.
    """
    places = [(detjax.models.layers, name) for name in PRODUCTS]
    for module, name in [*places, (detjax.models.decoder, "linear")]:  # of the layers, the head
        kernel, with_k = getattr(module, name), PRODUCTS[name]

        def product(*args, kernel=kernel, with_k=with_k, **options):
            num_rows, k_len = args[0].shape
            if num_rows == canonical_rows:
                return kernel(*args, **options)
            order = jnp.asarray(np.random.default_rng(num_rows).permutation(k_len))
            bits = jax.lax.bitcast_convert_type(args[0].astype(jnp.float32), jnp.uint32)
            all_bits = jax.lax.reduce(bits, jnp.uint32(0), jax.lax.bitwise_xor, (0, 1))
            order = jnp.where(all_bits >> 16 & 1, order, order[::-1])
            moved = [jnp.take(x, order, axis=-1) if i in with_k else x for i, x in enumerate(args)]
            return kernel(*moved, **options)

        monkeypatch.setattr(module, name, product)


def order_by_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each of several ranks add its share of K in a permutation of its own.

    Args:
        monkeypatch: Of the test. One rank calls another product, and keeps the canonical order.
    """
    kernel = detjax.models.layers.linear_partial

    def product(x, w, **options):
        order = np.random.default_rng(0).permutation(x.shape[1])
        return kernel(x[:, order], w[:, order], **options)

    monkeypatch.setattr(detjax.models.layers, "linear_partial", product)
