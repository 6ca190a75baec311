# SPDX-License-Identifier: Apache-2.0
"""The certificate as one HTML page that needs nothing else."""

import itertools
from collections.abc import Iterable
from html import escape

from detjax.certify.certificate import CLAIMS, Certificate, Outcome
from detjax.certify.coverage import COLUMNS
from detjax.certify.table import verdict

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 66rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100%; margin: 1rem 0 }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem; white-space: nowrap }
th, td { border-bottom: 1px solid #ccc }
td.text, td:last-child { white-space: normal; overflow-wrap: anywhere; min-width: 14rem }
th.n, td.n { text-align: right; font-variant-numeric: tabular-nums }
pre { white-space: pre-wrap } tr.control { color: #666 } tr.bad { background: #fdd }
.well { color: #060 } .ill { color: #a00 }
"""
OUTCOME_HEAD = (
    "<th>case</th><th class='n'>compared</th><th class='n'>different</th><th class='n'>time</th>"
    "<th>result</th>"
)


def render(certificate: Certificate) -> str:
    """Return HTML with all text escaped."""
    is_proven = certificate.is_proven
    what = "All claims hold" if is_proven else "Not proven"
    tone = "well" if is_proven else "ill"
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'>",
        f"<title>detjax: {escape(certificate.facts['model'])}</title><style>{STYLE}</style>",
        f"<h1>detjax certificate: <span class='{tone}'>{what}</span></h1>",
        _facts(certificate.facts.items()),
        f"<p>Probe: {escape(certificate.probe or 'no sum depends on its order')}.</p>",
    ]
    for claim in certificate.claims():
        tone = "well" if certificate.is_claim_proven(claim) else "ill"
        parts.append(f"<h2 class='{tone}'>{claim}</h2><p>{escape(CLAIMS[claim])}.</p>")
        rows = "".join(_outcome(its) for its in certificate.of(claim))
        parts.append(f"<table><tr>{OUTCOME_HEAD}</tr>{rows}</table>")
    for claim, reason in certificate.not_applicable.items():
        parts.append(f"<h2>{claim}</h2><p>Not applicable: {escape(reason)}.</p>")
    seconds = sum(outcome.seconds for outcome in certificate.outcomes)
    parts.append(f"<p>{len(certificate.outcomes)} cases in {seconds:.0f} s.</p>")
    parts.append("<h2>Coverage</h2><p>Mode fast makes no claim and is not listed.</p>")
    parts.append(_coverage(row for row in certificate.coverage if row[3] != "fast"))
    return "\n".join(parts) + "</html>\n"


def _outcome(its: Outcome) -> str:
    """The line of a case, and behind it the operation that differs."""
    kind = "control" if its.is_control else ""
    kind += "" if its.is_well else " bad"
    name = f"control: {its.case}" if its.is_control else its.case
    numbers = (f"{its.num_compared:,}", f"{its.num_different:,}", f"{its.seconds:.1f} s")
    cells = "".join(f"<td class='n'>{number}</td>" for number in numbers)
    first = "" if its.is_control else escape(its.first)
    line = (
        f"<tr class='{kind}'><td class='text'>{escape(name)}</td>{cells}"
        f"<td>{verdict(its)} {first}</td></tr>"
    )
    if its.cause:
        line += f"<tr class='bad'><td colspan='5'><pre>{escape(its.cause)}</pre></td></tr>"
    return line


def _coverage(rows: Iterable[tuple[str, ...]]) -> str:
    """The coverage map, the name of each model once."""
    lines = []
    for model, of_model in itertools.groupby(rows, key=lambda row: row[0]):
        found = list(of_model)
        for i, (_, *cells) in enumerate(found):
            name = f"<td rowspan='{len(found)}'>{escape(model)}</td>" if i == 0 else ""
            lines.append(f"<tr>{name}{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    head = "".join(f"<th>{escape(column)}</th>" for column in COLUMNS)
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    """A line for each fact."""
    lines = (f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in facts)
    return f"<table>{''.join(lines)}</table>"
