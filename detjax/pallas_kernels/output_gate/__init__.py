# SPDX-License-Identifier: Apache-2.0
"""The sigmoid that gates the results of attention."""
