# SPDX-License-Identifier: Apache-2.0
"""The activation that is gated by a GELU."""
