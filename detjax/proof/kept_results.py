# SPDX-License-Identifier: Apache-2.0
"""Results of an audit in a file, so that it can go on where it was interrupted."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from detjax.proof.positions import receipt_hash
from detjax.proof.receipt import Receipt
from detjax.proof.rerun import ReceiptDifference


class KeptResults:
    """One JSON object a line: what checks, then the result of each receipt that is done.

    The file is the auditor's own. Whoever can write it can write any result.
    """

    def __init__(self, path: Path | None, facts: Mapping[str, Any]):
        """Read what is done.

        Args:
            path: Of the file, which need not exist; None keeps nothing.
            facts: What the results depend on: weights, bits and the code here, what is accepted.

        Raises:
            ValueError: If the file holds results of other facts, or is no such file.
            OSError: If it cannot be read.
        """
        self._path, self._facts = path, dict(facts)
        self._done: dict[tuple[str, int], ReceiptDifference | None] = {}
        if path is not None and path.exists() and path.stat().st_size:
            self._read(path)
        elif path is not None:
            self._write(self._facts)

    def _read(self, path: Path) -> None:
        whole, _, unfinished = path.read_text().rpartition("\n")
        try:
            facts, *results = map(json.loads, whole.splitlines())
            for result in results:
                told = result["difference"]
                self._done[result["receipt"], result["num_checked"]] = told and ReceiptDifference(
                    **told
                )
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} holds no results of an audit; give another file") from error
        if facts != self._facts:
            unlike = sorted(k for k in facts | self._facts if facts.get(k) != self._facts.get(k))
            raise ValueError(
                f"{path} holds results of an audit with another {', '.join(unlike)}; give another "
                "file"
            )
        if unfinished:  # it was interrupted while it wrote
            path.write_text(whole + "\n")

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def done(
        self, receipts: Sequence[Receipt], lens: Sequence[int]
    ) -> dict[int, ReceiptDifference | None]:
        """Return the results of receipts that are done, by index."""
        if not self._done:
            return {}
        keys = [(receipt_hash(r), n) for r, n in zip(receipts, lens, strict=True)]
        found = {i: self._done[key] for i, key in enumerate(keys) if key in self._done}
        return {
            i: told and ReceiptDifference(
                index=i, field=told.field, receipt=told.receipt, here=told.here
            )
            for i, told in found.items()
        }  # fmt: skip

    def keep(self, receipt: Receipt, num_checked: int, found: ReceiptDifference | None) -> None:
        """Write a result."""
        told = found and {
            "index": found.index, "field": found.field, "receipt": found.receipt, "here": found.here
        }  # fmt: skip
        line = {"receipt": receipt_hash(receipt), "num_checked": num_checked, "difference": told}
        self._write(line)
