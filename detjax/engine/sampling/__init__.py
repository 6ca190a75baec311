# SPDX-License-Identifier: Apache-2.0
"""From logits to the chosen token: sampling, masks and forms."""
