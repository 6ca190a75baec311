# SPDX-License-Identifier: Apache-2.0
"""JSON with one spelling for each value: RFC 8785, so that bytes can be hashed and signed."""

from typing import Any


def canonical_json(value: Any) -> bytes:
    """Write a value in the canonical form of RFC 8785.

    Raises:
        ImportError: If the extra "receipts" is not installed.
        ValueError: If the value is not JSON, or an integer is beyond 2**53.
    """
    try:
        import rfc8785
    except ImportError as error:
        raise ImportError(f'{error}; pip install "detjax[receipts]"') from error
    return rfc8785.dumps(value)
