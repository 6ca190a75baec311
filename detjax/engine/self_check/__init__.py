# SPDX-License-Identifier: Apache-2.0
"""The engine checks itself where it runs: each program when compiled, some answers when idle."""
