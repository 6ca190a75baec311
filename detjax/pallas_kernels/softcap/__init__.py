# SPDX-License-Identifier: Apache-2.0
"""A soft bound on logits."""
