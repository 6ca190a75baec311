# SPDX-License-Identifier: Apache-2.0
"""Where two runs of a model diverge: the first token, layer and operation whose bits differ.

`detjax.diverge.find.find_divergence` does it in one call; see `python -m detjax.diverge --help`.
"""
