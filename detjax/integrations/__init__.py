# SPDX-License-Identifier: Apache-2.0
"""Adapters to other people's tools; each needs its extra."""
