# SPDX-License-Identifier: Apache-2.0
"""Tokens to text, logprobs and completions."""
