# SPDX-License-Identifier: Apache-2.0
"""Text of files that others wrote, as a terminal may show it.

A control character in a receipt, an answer or a file's name could move the cursor, hide a line or
write another verdict.
"""


def escaped(text: str) -> str:
    r"""Write each character that is not printable as an escape, such as `\x1b` or `\u202e`.

    These are the controls (C0, DEL, C1), new lines among them, format characters such as those that
    turn the direction of text, all spaces but the ASCII one, and halves of surrogate pairs.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def escaped_lines(text: str) -> str:
    """`escaped`, but for the new lines: of a text whose lines are detjax's own."""
    return "\n".join(map(escaped, text.split("\n")))
