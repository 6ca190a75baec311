# SPDX-License-Identifier: Apache-2.0
"""The live table: claims, cases, differences and time."""

import itertools

from rich.table import Table

from detjax.certify.certificate import Certificate, Outcome
from detjax.certify.coverage import COLUMNS


def verdict(outcome: Outcome) -> str:
    """Return the verdict in one or two words."""
    if outcome.is_control:
        return "differs, as it must" if outcome.is_well else "shows nothing"
    return "holds" if outcome.is_well else "DIFFERS"


def line(outcome: Outcome) -> str:
    """Format an outcome as one line, for output without a terminal."""
    control = "control: " if outcome.is_control else ""
    return (
        f"{outcome.claim}: {control}{outcome.case}: {outcome.num_different:,} of "
        f"{outcome.num_compared:,} differ, {outcome.seconds:.1f} s: {verdict(outcome)}"
    )


def make_table(certificate: Certificate, *, now: str = "") -> Table:
    """Make the table of all outcomes so far and of the running case."""
    table = Table(title="detjax.certify", caption=now)
    for name in ("claim", "case"):
        table.add_column(name)
    for name in ("compared", "different", "seconds"):
        table.add_column(name, justify="right")
    table.add_column("")
    for claim in certificate.claims():
        for i, its in enumerate(certificate.of(claim)):
            style = "dim" if its.is_control else ""
            table.add_row(
                claim if i == 0 else "",
                f"control: {its.case}" if its.is_control else its.case,
                f"{its.num_compared:,}",
                f"{its.num_different:,}",
                f"{its.seconds:.1f}",
                verdict(its),
                style=style if its.is_well else "bold red",
            )
        table.add_section()
    for claim, reason in certificate.not_applicable.items():
        table.add_row(claim, reason, "", "", "", "not applicable", style="dim")
    return table


def make_map(certificate: Certificate) -> Table:
    """Make the coverage map."""
    table = Table(title=f"coverage; this model is {certificate.facts['model']}")
    for name in COLUMNS:
        table.add_column(name)
    for model, rows in itertools.groupby(certificate.coverage, key=lambda row: row[0]):
        for i, row in enumerate(rows):
            table.add_row("" if i else model, *row[1:])
        table.add_section()
    return table
