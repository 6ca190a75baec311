# SPDX-License-Identifier: Apache-2.0
"""The certificate as one HTML page that needs nothing else."""

from collections.abc import Iterable
from html import escape

from detjax.certify.certificate import CLAIMS, Certificate
from detjax.certify.coverage import COLUMNS
from detjax.certify.table import verdict

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 66rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100%; margin: 1rem 0 }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #ccc }
pre { white-space: pre-wrap } td.n { text-align: right; font-variant-numeric: tabular-nums }
tr.control { color: #666 } tr.bad { background: #fdd }
.well { color: #060 } .ill { color: #a00 } td { overflow-wrap: anywhere }
"""


def render(certificate: Certificate) -> str:
    """Return HTML with all text escaped."""
    is_proven = certificate.is_proven
    what = "All claims hold" if is_proven else "Not proven"
    tone = "well" if is_proven else "ill"
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'>",
        f"<title>detjax: {escape(certificate.facts['model'])}</title><style>{STYLE}</style>",
        f"<h1>detjax certificate: <span class='{tone}'>{what}</span></h1>",
        _table(("", ""), [(name, text) for name, text in certificate.facts.items()]),
        f"<p>Probe: {escape(certificate.probe or 'no sum depends on its order')}.</p>",
    ]
    for claim in certificate.claims():
        tone = "well" if certificate.is_claim_proven(claim) else "ill"
        parts.append(f"<h2 class='{tone}'>{claim}</h2><p>{escape(CLAIMS[claim])}.</p>")
        rows = []
        for its in certificate.of(claim):
            kind = "control" if its.is_control else ""
            kind += "" if its.is_well else " bad"
            name = f"control: {its.case}" if its.is_control else its.case
            numbers = (f"{its.num_compared:,}", f"{its.num_different:,}", f"{its.seconds:.1f} s")
            cells = "".join(f"<td class='n'>{number}</td>" for number in numbers)
            first = "" if its.is_control else escape(its.first)
            rows.append(
                f"<tr class='{kind}'><td>{escape(name)}</td>{cells}"
                f"<td>{verdict(its)} {first}</td></tr>"
            )
            if its.cause:
                rows.append(
                    f"<tr class='bad'><td colspan='5'><pre>{escape(its.cause)}</pre></td></tr>"
                )
        head = "".join(f"<th>{h}</th>" for h in ("case", "compared", "different", "time", ""))
        parts.append(f"<table><tr>{head}</tr>{''.join(rows)}</table>")
    seconds = sum(outcome.seconds for outcome in certificate.outcomes)
    parts.append(f"<p>{len(certificate.outcomes)} cases in {seconds:.0f} s.</p><h2>Coverage</h2>")
    parts.append(_table(COLUMNS, certificate.coverage))
    return "\n".join(parts) + "</html>\n"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f"<table><tr>{top}</tr>{body}</table>"
