# SPDX-License-Identifier: Apache-2.0
"""Prove the claims on this machine, for one model and one engine configuration."""
