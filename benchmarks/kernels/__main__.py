# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.kernels`."""

from benchmarks.kernels.run import main

main()
