# SPDX-License-Identifier: Apache-2.0
"""Planted faults: the token, the layer and the operation that are named are those of the fault."""

import dataclasses
import re
from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import detjax.engine.outputs.output_processor
import detjax.engine.running.programs
import detjax.engine.sampling.sampling
import detjax.models.decoder
import detjax.models.layers
from detjax.diverge.divergence import Divergence
from detjax.diverge.find import find_divergence
from detjax.diverge.recorder import RecordedTaps
from detjax.diverge.runs import Models, Runs
from detjax.diverge.setting import RecordedAnswer, Setting
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.running.model_runner import ModelRunner
from detjax.models.fast import forward_fast, local_logits_fast
from detjax.models.forward_paths import FORWARD_PATHS
from detjax.models.loading import LoadedModel
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels import portable
from detjax.pallas_kernels.attention import portable as portable_attention
from detjax.pallas_kernels.fixed_blocks import round_to
from detjax.pallas_kernels.rope import portable as portable_rope
from detjax.pallas_kernels.sampling import noise
from detjax.testing.dummies import dummy_config, dummy_model

PAGE = 16
PROMPT = tuple((7 * i + 3) % 320 for i in range(20))
SAMPLING = SamplingParams(max_tokens=14, temperature=0.8, seed=5)


@cache
def loaded(dp: int, tp: int, num_layers: int, compute: str) -> LoadedModel:
    profile = NumericsProfile(attention_block=PAGE, attention_split=2 * PAGE, compute_dtype=compute)
    return dummy_model(dummy_config(num_layers=num_layers), dp=dp, tp=tp, profile=profile)


def find(a, b: str, *, num_layers=1, compute="float32", sampling=SAMPLING, is_deep=False):
    def load(setting: Setting) -> LoadedModel:
        return loaded(setting.dp, setting.tp, num_layers, compute)

    if isinstance(a, str):
        a = Setting.parse(a)
    return find_divergence(load, PROMPT, a, Setting.parse(b), sampling=sampling, is_deep=is_deep)


def assert_site(found: Divergence, name: str, *, layer: int | None, position: int, why=""):
    assert found.token is not None and found.site is not None, str(found)
    site = found.site
    assert (site.name, site.layer, site.position) == (name, layer, position), str(found)
    assert why in site.cause, str(found)
    assert 0 < site.num_different <= site.num_elements
    assert site.a.bits != site.b.bits and found.notes == (), str(found)
    assert found.token.position > position


# ---------------------------------------------------------------------------------------- controls


@pytest.mark.invariance
@pytest.mark.parametrize(
    "b",
    [
        pytest.param("batch=3,row=1,chunk=7,tp=2", marks=pytest.mark.slow),
        pytest.param("mode=dvr,batch=2,row=1", marks=pytest.mark.nightly),
        pytest.param("path=prefill,batch=2,chunk=9", marks=pytest.mark.nightly),
        pytest.param("batch=3,row=2,decode_steps=3,pages=6", marks=pytest.mark.nightly),
    ],
)
def test_without_a_fault_no_operation_differs_and_taps_change_no_bit(b):
    """Deep: every tap of every position. A note would say that a tapped program answers else."""
    found = find("", b, is_deep=True)
    assert not found.is_found and found.notes == (), str(found)
    assert "every operation that a tap sees" in str(found)


@pytest.mark.slow
@pytest.mark.control
def test_control_a_tap_that_changes_a_bit_is_noticed(monkeypatch):
    watch = RecordedTaps.watch

    def clumsy(self, ops, *, num_layers):
        scaled = dataclasses.replace(ops, cos=ops.cos * jnp.float32(0.999))
        return watch(self, scaled, num_layers=num_layers)

    monkeypatch.setattr(RecordedTaps, "watch", clumsy)
    found = find("", "batch=2", is_deep=True)
    assert [note.split(" ")[0] for note in found.notes] == ["a's", "b's"]
    assert "it is not run-invariant" in found.notes[0]


# ------------------------------------------------------------------------------------------ faults


@pytest.mark.slow
def test_splits_chosen_from_the_batch_are_found_in_their_layer(monkeypatch):
    sound = portable_attention.attention

    def attention(q, place, *, profile, **given):
        if place.layer == 1 and q.shape[0] > 1:
            profile = dataclasses.replace(profile, attention_split=PAGE)
        return sound(q, place, profile=profile, **given)

    monkeypatch.setattr(portable_attention, "attention", attention)
    found = find("", "batch=3,row=1", num_layers=2)
    assert_site(found, "attention", layer=1, position=20, why="it is attention itself")
    assert found.site.a.kernels != () and found.site.order == "blocks of 16 keys, splits of 32"
    assert found.site.b.beside[0].startswith("row 0: position "), str(found)


@pytest.mark.slow
def test_a_key_dropped_at_a_page_end_is_found_where_it_is_not_written(monkeypatch):
    sound = portable_rope.write_pages

    def write_pages(place, k, v):
        positions = place.positions
        if positions.shape[1] == 1:
            positions = jnp.where(positions % PAGE == PAGE - 1, -1, positions)
        return sound(place._replace(positions=positions), k, v)

    monkeypatch.setattr(portable_rope, "write_pages", write_pages)
    found = find("path=prefill", "")
    assert_site(found, "cached_k", layer=0, position=2 * PAGE - 1, why="b wrote nothing")


@pytest.mark.slow
def test_a_stale_page_is_found_by_what_it_no_longer_holds(monkeypatch):
    sound = ModelRunner._sync_pages

    def sync_pages(self, seq, *, is_new):
        at = seq.replica, seq.slot
        first = self._num_synced[at]
        sound(self, seq, is_new=is_new)
        if not is_new and self._config.num_slots > 1 and first < len(seq.pages):
            self._tables[at][first] = seq.pages[first - 1]

    monkeypatch.setattr(ModelRunner, "_sync_pages", sync_pages)
    found = find("", "batch=2,row=1")
    assert found.site is not None, str(found)
    assert_site(found, "attention", layer=0, position=2 * PAGE, why="no longer finds what it wrote")


@pytest.mark.slow
def test_psum_for_the_butterfly_is_found_as_a_sum_that_is_no_tree(monkeypatch):
    monkeypatch.setattr(
        detjax.models.layers, "butterfly_sum", lambda x, axis, size, *, backend: lax.psum(x, axis)
    )
    found = find("", "tp=4")
    why = "b does not add the ranks' terms as a binary tree"
    # The last layer of a prompt computes its last token alone.
    assert_site(found, "o_residual", layer=0, position=len(PROMPT) - 1, why=why)
    assert any("psum" in kernel for kernel in found.site.b.kernels), str(found)
    assert found.site.order == "a tree of 8 leaves of 16 over 1 ranks"


@pytest.mark.slow
def test_a_residual_rounded_early_is_found_as_a_rounding(monkeypatch):
    sound = portable.add_rms_norm

    def add_rms_norm(partial, *rest, eps):
        return sound(round_to(partial, jnp.dtype(jnp.bfloat16)), *rest, eps=eps)

    monkeypatch.setattr(portable, "add_rms_norm", add_rms_norm)
    found = find("", "tp=2", compute="bfloat16")
    why = "b does not round the residual stream and the sum once, together"
    # The last layer of a prompt computes its last token alone.
    assert_site(found, "o_residual", layer=0, position=len(PROMPT) - 1, why=why)


@pytest.mark.slow
def test_noise_keyed_by_the_row_is_found_in_its_key(monkeypatch):
    sound = noise.row_key

    def row_key(seed_low, seed_high, sequence_idx, position):
        rows = jnp.arange(position.size, dtype=jnp.int32)
        return sound(seed_low, seed_high, sequence_idx, rows)

    monkeypatch.setattr(noise, "row_key", row_key)
    found = find("", "batch=3,row=1")
    assert_site(found, "noise_key_0", layer=None, position=len(PROMPT))


@pytest.mark.slow
def test_a_wrong_row_of_the_rotary_table_is_found_there(monkeypatch):
    sound = detjax.models.layers.rope_rows

    def rope_rows(tables, positions):
        return sound(tables, positions + int(positions.shape[1] == 1))

    monkeypatch.setattr(detjax.models.decoder, "rope_rows", rope_rows)
    found = find("path=prefill", "")
    assert_site(found, "cos", layer=None, position=len(PROMPT))


@pytest.mark.nightly
def test_a_tie_that_top_p_breaks_by_the_batch_is_found_among_the_kept_tokens(monkeypatch):
    sound = detjax.engine.sampling.sampling._kept_tokens

    def kept_tokens(ctx, logits, rows):
        kept = sound(ctx, logits, rows)
        if len(logits) == 1:
            return kept
        least = jnp.min(jnp.where(kept, logits, jnp.inf), axis=1, keepdims=True)
        return kept | (logits >= least)

    monkeypatch.setattr(detjax.engine.sampling.sampling, "_kept_tokens", kept_tokens)
    model = loaded(1, 1, 1, "float32")
    head = np.repeat(np.asarray(model.params["lm_head"])[::2], 2, axis=0)  # every logit twice
    tied = dataclasses.replace(model, params={**model.params, "lm_head": jnp.asarray(head)})
    found = find_divergence(
        tied,
        PROMPT,
        Setting(),
        Setting(batch=3, row=1),
        sampling=dataclasses.replace(SAMPLING, top_p=0.01),
    )
    # Behind the prompt already: its choice program has the rows of the largest batch.
    assert_site(found, "kept_tokens", layer=None, position=len(PROMPT) - 1)
    assert (found.site.num_different, found.site.num_elements) == (1, 320)


@pytest.mark.nightly
def test_a_draft_accepted_too_many_is_found_as_a_token_that_was_run_and_not_answered(monkeypatch):
    sound = detjax.engine.running.programs.pack_verified

    def pack_verified(choice, num_accepted, *, length):
        return sound(choice, jnp.minimum(num_accepted + 1, length - 1), length=length)

    def wrong_drafts(ctx, params, hidden):
        return jnp.roll(local_logits_fast(ctx, params, hidden), 1, axis=1)

    monkeypatch.setattr(detjax.engine.running.programs, "pack_verified", pack_verified)
    monkeypatch.setitem(FORWARD_PATHS, "fast", (forward_fast, wrong_drafts))
    found = find("", "mode=dvr")
    assert found.token is not None
    why = ": what follows was not for it"
    assert_site(found, "ids", layer=None, position=found.token.position - 1, why=why)
    assert found.site is not None
    ran, answered = map(int, re.findall(r"\d+", found.site.cause))
    # The last token that both answered is that of `a`; what `b` ran in its place is the draft.
    assert (str(ran), str(answered)) == (found.site.b.value, found.site.a.value)
    assert ran != answered


@pytest.mark.nightly
def test_a_token_that_the_host_reads_wrongly_is_found_between_choice_and_answer(monkeypatch):
    sound = detjax.engine.outputs.output_processor.unpack_choice

    def unpack_choice(packed, num_top):
        choice = sound(packed, num_top)
        if len(packed) != 3:
            return choice
        return dataclasses.replace(choice, token_ids=choice.token_ids ^ 1)

    monkeypatch.setattr(detjax.engine.outputs.output_processor, "unpack_choice", unpack_choice)
    found = find("", "batch=3,row=1")
    assert_site(found, "commit", layer=None, position=len(PROMPT), why="b chose 257 and answered")


# --------------------------------------------------------------------------------- real differences


@pytest.mark.slow
def test_fast_differs_from_invariant_in_an_operation_that_exists():
    found = find("", "mode=fast", compute="bfloat16")
    # The last layer computes the last token of a prompt alone.
    at = len(PROMPT) - 1
    assert found.token is not None and found.site is not None and found.site.position == at
    assert found.site.b.program.startswith("prefill fast")
    assert any(kernel.startswith("portable_") for kernel in found.site.a.kernels)
    assert any(kernel.startswith("dot_general") for kernel in found.site.b.kernels)
    assert f"first operation that differs: position {at}, layer 0" in str(found)


@pytest.mark.slow
def test_a_canonical_answer_against_another_mode_is_tapped_in_its_own():
    runs = Runs(Models(loaded(1, 1, 1, "bfloat16")), PROMPT, SAMPLING)
    answer = runs.answer(Setting())
    given = RecordedAnswer(
        prompt_token_ids=PROMPT, token_ids=answer.token_ids, logprobs=answer.logprobs
    )
    found = find(given, "mode=fast", compute="bfloat16")
    assert found.token is not None and found.site is not None, str(found)
    assert found.site.a.program.startswith("prefill invariant")
    assert found.site.b.program.startswith("prefill fast")
    assert len(found.notes) == 1 and found.notes[0].startswith("the answer is that of setting")


@pytest.mark.nightly
def test_an_answer_is_compared_and_the_setting_that_gives_it_is_tapped(monkeypatch):
    """What the path of prefill answered under a fault of decoding, against decoding."""
    sound = detjax.models.layers.rope_rows

    def rope_rows(tables, positions):
        return sound(tables, positions + int(positions.shape[1] == 1))

    plain = find("", "batch=2")
    assert not plain.is_found
    monkeypatch.setattr(detjax.models.decoder, "rope_rows", rope_rows)
    faulty = find("path=prefill", "")
    assert faulty.token is not None and faulty.token.a is not None
    kept = faulty.token.index + 1
    # Up to the token that differs both answers have the same ids.
    ids, logprobs = _answer_of(faulty, kept)
    answer = RecordedAnswer(prompt_token_ids=PROMPT, token_ids=ids, logprobs=logprobs)
    found = find(answer, "")
    assert found.site is not None and found.site.name == "cos", str(found)
    assert found.notes == ("the answer is that of setting path=prefill, which is tapped as a",)


def _answer_of(found: Divergence, count: int):
    runs = Runs(Models(loaded(1, 1, 1, "float32")), PROMPT, SAMPLING)
    decoded = runs.answer(Setting())
    answer = runs.answer(Setting(path="prefill"), like=decoded)
    assert answer.token_ids[: count - 1] == decoded.token_ids[: count - 1]
    return answer.token_ids[:count], answer.logprobs[:count]
