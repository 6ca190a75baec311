# SPDX-License-Identifier: Apache-2.0
"""What others wrote is shown without characters that change what a terminal shows."""

import sys

from detjax.cli import errors
from detjax.cli.display import Display
from detjax.cli.errors import BAD_INPUT, INTERNAL_ERROR, InputError, exit_code
from detjax.escaping import escaped, escaped_lines

BAD = "\x1b[2K\r\n\x00\x7f\x85\x9b\u200e\u202e\u2066\u2028\ufeff\ud800"
"""Of each kind: an escape sequence, C0, DEL, C1, marks of direction, a line separator, halves."""


def test_every_character_that_is_not_printable_is_escaped():
    everything = "".join(map(chr, range(sys.maxunicode + 1)))
    found = escaped(everything)
    assert found.isprintable() and escaped(found) == found
    assert escaped("ä 中 \U0001f600") == "ä 中 \U0001f600"
    assert escaped("a\x1b[2J\u202e\n") == "a\\x1b[2J\\u202e\\n"
    assert escaped_lines("a\x1b\nb\r\x85") == "a\\x1b\nb\\r\\x85"


def test_an_error_has_no_control_characters(capsys):
    def refuse() -> int:
        raise InputError(f"x{BAD}y")

    def fail() -> int:
        raise RuntimeError(f"x{BAD}y")

    def cannot_write() -> int:
        raise OSError(28, "No space left on device", f"x{BAD}y")

    for run, code in ((refuse, BAD_INPUT), (fail, INTERNAL_ERROR), (cannot_write, BAD_INPUT)):
        assert exit_code(run) == code
        err = capsys.readouterr().err
        assert all(line.isprintable() for line in err.split("\n")), err
        assert r"\x1b[2K" in err
    assert errors.one_line(f"a{BAD}").isprintable()


def test_what_is_told_beside_the_output_has_no_control_characters(capsys):
    display = Display()
    display.line(f"x{BAD}y")
    display.line(f"x{BAD}y", style="red")
    display.facts({"model": f"x{BAD}y"})
    display.table("a table", ("what",), [(f"x{BAD}y",)])
    err = capsys.readouterr().err
    assert err.count("x1b[2K") == 4
    assert all(line.isprintable() for line in err.split("\n")), err
