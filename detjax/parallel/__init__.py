# SPDX-License-Identifier: Apache-2.0
"""The mesh and the collectives whose order is fixed."""
