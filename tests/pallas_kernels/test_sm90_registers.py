# SPDX-License-Identifier: Apache-2.0
"""Shares of registers that a CTA does not have, which a GPU waits for without end."""

import pytest

from detjax.pallas_kernels.sm90_registers import RegisterShares


@pytest.mark.parametrize(
    ("computing", "sizes"),
    [(240, (2, 1)), (160, (3, 1)), (232, (2, 2))],
)
def test_shares_of_all_registers_are_taken(computing, sizes):
    """Three warpgroups start with 168 a thread, four with 128."""
    num_computing, num_loading = sizes
    shares = RegisterShares(
        computing=computing, loading=24, num_computing=num_computing, num_loading=num_loading
    )
    assert computing * num_computing + shares.loading * num_loading <= 512


@pytest.mark.parametrize(
    ("computing", "loading", "sizes", "says"),
    [
        # Prefill of float8 pages had these: each of its GPU tests hung.
        (240, 32, {"num_computing": 2}, "need 512 registers of each 3 threads, and a CTA starts"),
        (240, 24, {"num_computing": 3}, "need 744"),
        (232, 32, {"num_computing": 2, "num_loading": 2}, "need 528"),
        (160, 40, {"num_computing": 2}, "must give registers of 168 away"),
    ],
)
def test_shares_that_would_be_waited_for_are_refused(computing, loading, sizes, says):
    with pytest.raises(ValueError, match=says):
        RegisterShares(computing=computing, loading=loading, **sizes)
