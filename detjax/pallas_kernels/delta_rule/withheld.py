# SPDX-License-Identifier: Apache-2.0
"""Operations of gated DeltaNet on backends without them: `withheld_linear_attention` says why."""

from typing import NoReturn

_REASON = "{} has portable kernels alone; use backend portable"


def delta_rule(
    rows, filters, gates, row_pages, state_pages, page_table, positions, layer: int
) -> NoReturn:
    """See `api.delta_rule`."""
    raise NotImplementedError(_REASON.format("delta_rule"))


def gated_rms_norm(x, z, gain, *, eps: float) -> NoReturn:
    """See `api.gated_rms_norm`."""
    raise NotImplementedError(_REASON.format("gated_rms_norm"))


def sigmoid_gate(heads, gate) -> NoReturn:
    """See `output_gate.api.sigmoid_gate`."""
    raise NotImplementedError(_REASON.format("sigmoid_gate"))
