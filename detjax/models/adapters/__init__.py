# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters: read from PEFT's folders, checked against the model, put on the devices."""
