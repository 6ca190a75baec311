# SPDX-License-Identifier: Apache-2.0
"""Which dtype x backend x mode of a model is proven, refused, or not covered."""

from collections.abc import Collection

from detjax.models.abstract import why_unsupported
from detjax.models.loading import LoadedModel
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import TP_AXIS
from detjax.serving.config import MODES

DTYPES = ("bfloat16", "float32")


def coverage_map(
    model: LoadedModel, *, modes: Collection[str], is_proven: bool
) -> list[tuple[str, str, str, str]]:
    """(dtype, backend, mode, state) of every combination.

    Args:
        model: Under proof.
        modes: That were run.
        is_proven: Whether no bit differed.
    """
    rows = []
    for dtype in DTYPES:
        profile = NumericsProfile(weight_dtype=dtype, compute_dtype=dtype)
        for backend in Backend:
            refused = why_unsupported(model.config, profile, backend, model.mesh.shape[TP_AXIS])
            for mode in MODES:
                is_this = (profile, backend) == (model.profile, model.backend) and mode in modes
                if mode == "fast":
                    state = "no claim is made"
                elif refused is not None:
                    state = f"refused: {refused}"
                elif is_this:
                    state = "proven" if is_proven else "not proven"
                else:
                    state = "not covered by this run"
                rows.append((dtype, backend.value, mode, state))
    return rows
