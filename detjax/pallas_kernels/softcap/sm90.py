# SPDX-License-Identifier: Apache-2.0
"""A soft bound on logits on Hopper: not there yet."""

import jax


def softcap(logits, *, cap: float) -> jax.Array:
    """See `api.softcap`.

    Raises:
        NotImplementedError: Always.
    """
    raise NotImplementedError(
        f"sm90 has no kernel of a soft cap on logits ({cap=}); use the backend portable"
    )
