# SPDX-License-Identifier: Apache-2.0
"""From a traced function to an executable that may be kept: checks, caches, toolchain."""
