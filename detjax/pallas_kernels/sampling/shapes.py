# SPDX-License-Identifier: Apache-2.0
"""Named vocabulary sizes, shared with log_softmax."""

from detjax.pallas_kernels.log_softmax.shapes import VOCABULARIES

__all__ = ["VOCABULARIES"]
