# SPDX-License-Identifier: Apache-2.0
"""Programs, what lies on the devices, and the launches."""
