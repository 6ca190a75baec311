# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible HTTP server over the engine: `python -m detjax.serve`."""
