# SPDX-License-Identifier: Apache-2.0
"""Where two runs of a model part: the first token, layer and operation whose bits differ.

`detjax.diverge.find.find_divergence` is all of it in one call; `python -m detjax.diverge --help`.
"""
