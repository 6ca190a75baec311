# SPDX-License-Identifier: Apache-2.0
"""What nondeterminism does, measured again: python -m benchmarks.reproduce NAME."""
