# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, alone and fused with the residual addition."""
