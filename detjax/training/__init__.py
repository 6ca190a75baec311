# SPDX-License-Identifier: Apache-2.0
"""Training on exactly what was sampled: the forward pass of inference, with gradients."""
