# SPDX-License-Identifier: Apache-2.0
"""Every operation that rounds a float, one folder each."""
