# SPDX-License-Identifier: Apache-2.0
"""What a client asks, checked, and what the engine knows of it."""
