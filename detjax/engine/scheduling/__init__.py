# SPDX-License-Identifier: Apache-2.0
"""Which sequences run next, in which pages of the cache."""
