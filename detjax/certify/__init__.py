# SPDX-License-Identifier: Apache-2.0
"""Proves the claims on this machine, for one model and one engine configuration."""
