# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding."""
