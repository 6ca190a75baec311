# SPDX-License-Identifier: Apache-2.0
"""Programs with a claim are compiled so that no rounding may be left out."""

import re

import pytest

from detjax.testing.dummies import dummy_config, dummy_model
from detjax.testing.programs import plain_key, programs_for


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "is_allowed"), [("invariant", False), ("fast", True)])
def test_a_compiled_program_knows_whether_a_rounding_may_be_left_out(mode, is_allowed):
    """Read from the program itself, which carries the options that it was compiled with."""
    model = dummy_model(dummy_config(num_layers=1))
    key = plain_key("decode", rows=1, length=1, table_len=1, mode=mode)
    compiled = programs_for(model, num_pages=2, num_slots=1).get(key, model.params)
    program = compiled.runtime_executable().serialize()
    # A map entry of a protocol buffer: the name, then a message whose field 2 is the value.
    found = re.findall(rb"\x1axla_allow_excess_precision\x12\x02\x10([\x00\x01])", program)
    assert found == [bytes([is_allowed])]
    assert b"xla_disable_hlo_passes" in program
