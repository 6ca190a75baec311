# SPDX-License-Identifier: Apache-2.0
"""Log-softmax over a vocabulary that may be split over ranks."""
