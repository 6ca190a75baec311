# SPDX-License-Identifier: Apache-2.0
"""The one table of kernel sets. Another architecture is a module of kernels, and a line here."""

from detjax.pallas_kernels import portable, reference, sm90
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.kernel_set import KernelSet

KERNELS: dict[Backend, KernelSet] = {
    Backend.SM90: sm90,
    Backend.REFERENCE: reference,
    Backend.PORTABLE: portable,
}
"""The kernel set of each backend, first choice first."""
