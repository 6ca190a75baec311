# SPDX-License-Identifier: Apache-2.0
"""GeGLU on Hopper: not there yet."""

import jax


def geglu(gate_up) -> jax.Array:
    """See `api.geglu`.

    Raises:
        NotImplementedError: Always.
    """
    raise NotImplementedError("sm90 has no kernel of GeGLU; use the backend portable")
