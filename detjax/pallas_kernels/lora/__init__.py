# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters of linear layers."""
