# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: routing, the experts' products, and their combination."""
