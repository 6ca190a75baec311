# SPDX-License-Identifier: Apache-2.0
"""Mark the cases of a test that run only in the slow suite."""

from collections.abc import Iterable
from typing import Any

import pytest


def quick_and_slow(quick: Iterable[Any], slow: Iterable[Any]) -> list[Any]:
    """Return cases for `pytest.mark.parametrize`; those only in `slow` are marked slow.

    A case with several parameters is a tuple.
    """
    quick = list(quick)
    rest = [case for case in slow if not any(case is q or case == q for q in quick)]
    marked = [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in rest
    ]
    return [*quick, *marked]
