# SPDX-License-Identifier: Apache-2.0
"""Products of a backward pass that no kernel of a forward pass computes."""
