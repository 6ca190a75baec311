# SPDX-License-Identifier: Apache-2.0
"""Requests, sampling, the paged cache, and the engine that runs them."""
