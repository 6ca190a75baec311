# SPDX-License-Identifier: Apache-2.0
"""A tap looks, and adds nothing: programs lower to one text whether somebody looks or not."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from detjax.diverge.recorder import RecordedTaps
from detjax.engine.running.program_key import ProgramKey
from detjax.engine.running.programs import ProgramCache
from detjax.models.config import Gating, ModelConfig, NormPlacement
from detjax.models.transformer import DecoderOps
from detjax.testing.cases import quick_and_slow
from detjax.testing.dummies import dummy_config, dummy_model
from detjax.testing.programs import plain_key

CONFIG = dummy_config(num_layers=2, qk_norm=True)
NORMS_AFTER = dataclasses.replace(
    dummy_config(num_layers=2), norms=NormPlacement.AFTER, is_qk_norm_whole=True
)
NORMS_AROUND = dataclasses.replace(
    dummy_config(num_layers=2), norms=NormPlacement.BOTH, gating=Gating.GEGLU, gain_offset=1.0
)


class Clumsy(RecordedTaps):
    """Not a tap: the operations that it watches are not those that it was given."""

    def watch(self, ops: DecoderOps, *, num_layers: int) -> DecoderOps:
        scaled = dataclasses.replace(ops, cos=ops.cos * jnp.float32(0.999))
        return super().watch(scaled, num_layers=num_layers)


def lowered(
    key: ProgramKey, tp: int, taps: RecordedTaps | None, config: ModelConfig = CONFIG
) -> str:
    """The text of a program. What taps keep is not a result of it."""
    model = dummy_model(config, tp=tp)
    programs = ProgramCache(model, num_pages=8, num_slots=4, window_len=4)
    if taps is not None:
        programs._context = dataclasses.replace(programs._context, taps=taps)
    operands = programs.operands(key, model.params)
    return jax.jit(programs.function(key), donate_argnums=2).lower(*operands).as_text()


CASES = quick_and_slow(
    [("decode", 2, 1, "invariant", 1)],
    [
        ("decode", 2, 1, "fast", 1),
        ("prefill", 1, 64, "invariant", 4),
        ("prefill", 1, 512, "invariant", 2),  # rows of the residual stream are shared out
        ("verify", 2, 4, "invariant", 2),
    ],
)


@pytest.mark.slow
@pytest.mark.parametrize("config", [NORMS_AFTER, NORMS_AROUND], ids=["after", "around"])
@pytest.mark.parametrize("mode", ["invariant", "fast"])
def test_a_program_with_norms_after_lowers_to_the_same_text(config, mode):
    key, taps = plain_key("decode", rows=2, table_len=2, mode=mode), RecordedTaps()
    assert lowered(key, 2, taps, config) == lowered(key, 2, None, config)
    names = {tap.name for tap, _ in taps.seen}
    assert {"embed", "qkv", "attention", "o_residual", "gated", "down_residual"} <= names
    assert len({tap for tap, _ in taps.seen}) == len(taps.seen)


@pytest.mark.parametrize(("kind", "rows", "length", "mode", "tp"), CASES)
def test_a_program_lowers_to_the_same_text_whether_its_taps_are_seen(kind, rows, length, mode, tp):
    key = plain_key(kind, rows=rows, length=length, table_len=2, mode=mode)
    taps = RecordedTaps()
    assert lowered(key, tp, taps) == lowered(key, tp, None)
    names = {tap.name for tap, _ in taps.seen}
    assert {"embed", "qkv", "attention", "o_residual", "gated", "logits", "token_id"} <= names
    assert {tap.layer for tap, _ in taps.seen} == {None, 0, 1}
    assert len({tap for tap, _ in taps.seen}) == len(taps.seen)


@pytest.mark.slow
@pytest.mark.control
def test_control_another_operation_changes_the_text():
    key = plain_key("decode", rows=2, table_len=2)
    assert lowered(key, 1, Clumsy()) != lowered(key, 1, None)
