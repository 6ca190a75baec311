# SPDX-License-Identifier: Apache-2.0
"""The parts of `python -m detjax.generate`, in the order of `command.run`."""
