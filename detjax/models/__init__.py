# SPDX-License-Identifier: Apache-2.0
"""One functional decoder, the families it covers, and their weights, tables and tokenizers."""
