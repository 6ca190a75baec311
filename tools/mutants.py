# SPDX-License-Identifier: Apache-2.0
"""Deliberate faults, each of which a quick test must find.

    python tools/mutants.py               # every fault: half an hour on two cores
    python tools/mutants.py -k noise      # those whose name contains "noise"
    python tools/mutants.py --list

Each fault is made in a copy of the tree, never in place, and its tests run there. The same tests
run once without a fault first. Exit status 1 if a fault survives its tests or hangs them, if a text
to replace is not found exactly once, or if the tests fail without a fault.

A compilation cache is shared by all runs; JAX_COMPILATION_CACHE_DIR keeps it for the next time.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = shutil.ignore_patterns(
    ".git", "__pycache__", ".pytest_cache", ".ruff_cache", ".venv", "*.egg-info", "results"
)
KERNELS, ENGINE = "detjax/pallas_kernels", "detjax/engine"
CLAIMS, SCHEDULES = "tests/invariance/test_kernel_claims.py", "tests/invariance/test_schedules.py"
SAMPLES = "tests/engine/test_sampling.py"
SPECULATION = "tests/engine/test_speculation.py"
CHOICE, ROUNDING = "tests/engine/test_choice.py", "tests/pallas_kernels/test_rounding.py"
DELTA_RULE = "tests/pallas_kernels/test_delta_rule_sm90.py"
PINNED = "tests/invariance/test_pinned.py"
SIGMOID_ROUTER = "tests/pallas_kernels/test_sigmoid_router.py"
FLOAT8_CACHE = "tests/pallas_kernels/test_float8_cache.py"


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """One replacement.

    Attributes:
        where: A file, or a folder in one of whose Python files the text stands.
        old: Stands there exactly once.
        new: What it becomes.
    """

    where: str
    old: str
    new: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One fault.

    Attributes:
        name: Words with dashes.
        fault: What is wrong, in one sentence.
        edits: What makes it so.
        tests: At least one of these fails.
    """

    name: str
    fault: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]


class MutantError(Exception):
    """A fault that cannot be made."""


MUTANTS = (
    Mutant(
        name="steps-read-out-of-order",
        fault="the results of the newest step in flight are read first",
        edits=(
            Edit(
                where=f"{ENGINE}/step_loop.py",
                old="self._finish(*self._in_flight.popleft())",
                new="self._finish(*self._in_flight.pop())",
            ),
        ),
        tests=("tests/engine/test_engine.py::test_the_host_reads_results_some_steps_late",),
    ),
    Mutant(
        name="delta-rule-from-the-chunk",
        fault="a chunk of linear attention goes on from its block's state without the rows between",
        edits=(
            Edit(
                where=f"{KERNELS}/delta_rule/portable.py",
                old="lax.fori_loop(start, stop, read_token, state)",
                new="lax.fori_loop(jnp.maximum(start, first), stop, read_token, state)",
            ),
        ),
        tests=(f"{CLAIMS}::test_delta_rule_is_bitwise_schedule_invariant",),
    ),
    Mutant(
        name="two-async-engines",
        fault="two AsyncEngines with requests step one engine, and drop outputs of the other",
        edits=(
            Edit(
                where=f"{ENGINE}/outputs_lease.py",
                old="other is not holder and other.has_open_requests",
                new="other is None",
            ),
        ),
        tests=("tests/engine/test_engine.py::test_two_async_engines_on_one_engine_lose_no_output",),
    ),
    Mutant(
        name="compiled-while-held",
        fault="a program of a trainer is compiled while it holds its devices",
        edits=(
            Edit(
                where="detjax/parallel/dispatch.py",
                old="compiled = self._jitted.lower(*operands).compile()",
                new="with one_order(jax.devices()): compiled = "
                "self._jitted.lower(*operands).compile()",
            ),
        ),
        tests=(
            "tests/parallel/test_dispatch.py::test_a_program_is_compiled_while_nothing_is_held",
        ),
    ),
    Mutant(
        name="rest-not-settled",
        fault="an engine comes to rest while a program is still to be called",
        edits=(
            Edit(
                where=f"{ENGINE}/step_loop.py",
                old="            self._runner.settle()\n",
                new="            pass\n",
            ),
        ),
        tests=(
            "tests/engine/test_device_state.py::test_weights_may_go_when_nothing_is_left_to_do",
        ),
    ),
    Mutant(
        name="calls-by-two-threads",
        fault="two programs are called at once",
        edits=(
            Edit(
                where=f"{ENGINE}/running/device_state.py",
                old="ThreadPoolExecutor(max_workers=1,",
                new="ThreadPoolExecutor(max_workers=2,",
            ),
        ),
        tests=(
            "tests/engine/test_device_state.py"
            "::test_programs_are_called_in_order_by_one_thread_which_is_not_the_caller_s",
        ),
    ),
    Mutant(
        name="kept-program-not-verified",
        fault="a compiled program is run as it lies on the disk",
        edits=(
            Edit(
                where="detjax/compilation/kept_trust.py",
                old="return value if hmac.compare_digest(code, self.code(name, value)) else None\n",
                new="return value if code else None\n",
            ),
        ),
        tests=(
            "tests/compilation/test_kept_programs.py::test_a_damaged_program_is_removed_and_not_run",
        ),
    ),
    Mutant(
        name="folder-of-others-is-used",
        fault="a folder that others may write to is taken for programs",
        edits=(
            Edit(
                where="detjax/compilation/kept_trust.py",
                old="    if found.st_mode & _WRITABLE_BY_OTHERS:\n",
                new="    if found.st_mode & 0:\n",
            ),
        ),
        tests=(
            "tests/compilation/test_kept_programs.py"
            "::test_a_folder_that_others_may_write_to_is_refused_by_name",
        ),
    ),
    Mutant(
        name="receipt-not-made-again",
        fault="an audit compares tokens and logprobs, and no other byte",
        edits=(
            Edit(
                where="detjax/proof/rerun.py",
                old="        if here.to_json() != said.to_json():\n",
                new='        if here.answer["token_ids"] != said.answer["token_ids"]:\n',
            ),
        ),
        tests=("tests/proof/test_forgery.py::test_receipts_of_one_request_share_an_answer",),
    ),
    Mutant(
        name="receipt-of-the-weights-of-now",
        fault="a receipt names the weights that compute now, not those that made the answer",
        edits=(
            Edit(
                where="detjax/llm.py",
                old="        if made_by != history.current:\n",
                new="        if made_by < 0:\n",
            ),
        ),
        tests=(
            "tests/proof/test_weights.py::test_a_receipt_names_the_weights_that_made_the_answer",
        ),
    ),
    Mutant(
        name="toolchain-not-in-fingerprint",
        fault="builds of two assemblers have one fingerprint",
        edits=(
            Edit(
                where="detjax/numerics.py",
                old="        return values if self.toolchain else {",
                new="        return {",
            ),
        ),
        tests=(
            "tests/compilation/test_toolchain.py"
            "::test_two_assemblers_have_two_fingerprints_and_two_folders_of_programs",
        ),
    ),
    Mutant(
        name="branch-written-in-place",
        fault="the check of programs forgets what a branch wrote over an argument",
        edits=(
            Edit(
                where="detjax/compilation/donation.py",
                old="    events.steps += written\n",
                new="    events.write(operands[1:], instruction.name)\n",
            ),
        ),
        tests=("tests/compilation/test_donation.py::test_a_branch_may_have_written_in_place",),
    ),
    Mutant(
        name="calls-in-two-orders",
        fault="two threads put their programs into the queues of devices in two orders",
        edits=(
            Edit(
                where="detjax/parallel/dispatch.py",
                old="        if len(devices) > 1:\n",
                new="        if len(devices) > 8:\n",
            ),
        ),
        tests=(
            "tests/parallel/test_dispatch.py::test_calls_on_devices_in_common_are_in_one_order",
        ),
    ),
    Mutant(
        name="prompt-counts-as-output",
        fault="a penalty counts the tokens of the prompt",
        edits=(
            Edit(
                where="detjax/engine/sampling/adjustments.py",
                old="    uses = np.minimum(",
                new="    uses = 3 * np.minimum(",
            ),
        ),
        tests=(
            "tests/engine/test_logits_processors.py"
            "::test_adjusted_logits_are_those_of_the_specification",
        ),
    ),
    Mutant(
        name="split-from-batch",
        fault="attention takes the length of a split from the batch",
        edits=(
            Edit(
                where=f"{KERNELS}/attention/portable.py",
                old="tile.fold_splits(profile.attention_split)",
                new="tile.fold_splits(profile.attention_split // (2 if batch > 1 else 1))",
            ),
        ),
        tests=(f"{CLAIMS}::test_attention_is_bitwise_batch_invariant_past_a_split",),
    ),
    Mutant(
        name="butterfly-is-psum",
        fault="ranks are added in the order of psum",
        edits=(
            Edit(
                where="detjax/parallel/collectives.py",
                old="    distance = 1\n",
                new="    return lax.psum(partial, axis_name)\n    distance = 1\n",
            ),
        ),
        tests=(f"{CLAIMS}::test_butterfly_sum_is_bitwise_mesh_invariant",),
    ),
    Mutant(
        name="residual-rounded-twice-in-norm",
        fault="add_rms_norm rounds the product before it adds it to the residual stream",
        edits=(
            Edit(
                where=f"{KERNELS}/rms_norm/portable.py",
                old="astype(jnp.float32) + total, dtype)",
                new="astype(jnp.float32) + round_to(total, dtype), dtype)",
            ),
        ),
        tests=(f"{ROUNDING}::test_a_norm_rounds_the_residual_stream_once",),
    ),
    Mutant(
        name="residual-rounded-twice-in-product",
        fault="linear_add rounds the product before it adds it to the residual stream",
        edits=(
            Edit(
                where=f"{KERNELS}/linear/portable.py",
                old="astype(jnp.float32) + total, dtype)",
                new="astype(jnp.float32) + round_to(total, dtype), dtype)",
            ),
        ),
        tests=(f"{ROUNDING}::test_a_product_rounds_the_residual_stream_once",),
    ),
    Mutant(
        name="residual-rounded-twice-everywhere",
        fault="both kernels round the product before the residual stream, and agree",
        edits=(
            Edit(
                where=f"{KERNELS}/rms_norm/portable.py",
                old="astype(jnp.float32) + total, dtype)",
                new="astype(jnp.float32) + round_to(total, dtype), dtype)",
            ),
            Edit(
                where=f"{KERNELS}/linear/portable.py",
                old="astype(jnp.float32) + total, dtype)",
                new="astype(jnp.float32) + round_to(total, dtype), dtype)",
            ),
        ),
        tests=(ROUNDING, f"{PINNED}::test_bits_are_those_of_this_numerics_version[bfloat16]"),
    ),
    Mutant(
        name="softmax-weights-unrounded",
        fault="attention's weights are not rounded to the compute dtype",
        edits=(
            Edit(
                where=f"{KERNELS}/attention/portable.py",
                old="round_to(weights, self.dtype)",
                new="weights",
            ),
        ),
        tests=(
            f"{ROUNDING}::test_softmax_weights_are_rounded_to_the_compute_dtype_and_their_sum_is_not",
        ),
    ),
    Mutant(
        name="rope-ends-at-8192",
        fault="every position past 8192 is rotated as 8192",
        edits=(
            Edit(
                where="detjax/models/rope.py",
                old="    positions = np.arange(max_len, dtype=np.uint64)\n",
                new="    positions = np.arange(max_len, dtype=np.uint64).clip(max=8192)\n",
            ),
        ),
        tests=("tests/models/test_rope.py",),
    ),
    Mutant(
        name="noise-by-row",
        fault="noise is keyed by the row of the batch instead of the position",
        edits=(
            Edit(
                where=f"{KERNELS}/sampling/noise.py",
                old="    counter = (sequence_idx.astype(jnp.uint32), position",
                new="    position = jnp.arange(position.size).reshape(position.shape)\n"
                "    counter = (sequence_idx.astype(jnp.uint32), position",
            ),
        ),
        tests=(f"{CHOICE}::test_noise_belongs_to_the_position_and_not_to_the_row",),
    ),
    Mutant(
        name="noise-without-the-prompt",
        fault="prompts of one length draw the same noise",
        edits=(
            Edit(
                where="detjax/engine/requests/sampling_params.py",
                old='"little") + ids',
                new='"little")',
            ),
        ),
        tests=(f"{SAMPLES}::test_prompts_of_one_seed_agree_as_often_as_chance_has_it",),
    ),
    Mutant(
        name="seed-of-32-bits",
        fault="the high 32 bits of a seed are dropped",
        edits=(Edit(where=ENGINE, old="(p.seed or 0) >> 32 for", new="0 for"),),
        tests=(f"{CHOICE}::test_every_bit_of_the_seed_counts",),
    ),
    Mutant(
        name="ties-in-another-order",
        fault="of equal logits, filters keep the highest token ids",
        edits=(
            Edit(
                where=ENGINE,
                old="lax.sort((keys, columns),",
                new="lax.sort((keys[:, ::-1], columns[:, ::-1]),",
            ),
        ),
        tests=(f"{CHOICE}::test_of_equal_logits_the_lowest_token_ids_are_kept[top-p-1]",),
    ),
    Mutant(
        name="top-k-keeps-ties",
        fault="top-k keeps one more token where the next logit is equal",
        edits=(
            Edit(
                where=ENGINE,
                old="    kept = (rank < top_k[:, None]) & in_nucleus",
                new="    last = jnp.take_along_axis(ranked, top_k[:, None] - 1, axis=1)\n"
                "    kept = (ranked >= last) & in_nucleus",
            ),
        ),
        tests=(f"{CHOICE}::test_of_equal_logits_the_lowest_token_ids_are_kept[top-k-1]",),
    ),
    Mutant(
        name="page-taken-twice",
        fault="a free page is handed out and stays free",
        edits=(
            Edit(
                where="detjax/engine/scheduling/kv_cache.py",
                old="return self._free.pop()",
                new="return self._free[-1]",
            ),
        ),
        tests=("tests/engine/test_kv_cache.py",),
    ),
    Mutant(
        name="page-reused-under-its-key",
        fault="a page is handed out again and still found under its old key",
        edits=(
            Edit(
                where=ENGINE,
                old="del self._page_of[self._key_of.pop(page)]",
                new="self._key_of.pop(page)",
            ),
        ),
        tests=("tests/engine/test_kv_cache.py",),
    ),
    Mutant(
        name="page-key-without-parent",
        fault="the key of a page forgets the pages before it",
        edits=(
            Edit(
                where=ENGINE,
                old="hasher = hashlib.sha256(parent)",
                new="hasher = hashlib.sha256(parent[:0])",
            ),
        ),
        tests=("tests/engine/test_kv_cache.py",),
    ),
    Mutant(
        name="page-registered-before-computed",
        fault="a page can be found before the launch that writes it",
        edits=(
            Edit(where=ENGINE, old="coming.setdefault(key, page)", new="pool.register(page, key)"),
        ),
        tests=("tests/engine/test_scheduler.py",),
    ),
    Mutant(
        name="page-shared-before-its-last-key",
        fault="a page is shared when its last token is chosen, whose keys do not exist yet",
        edits=(Edit(where=ENGINE, old="len(seq.tokens) - 1)\n", new="len(seq.tokens))\n"),),
        tests=(f"{SCHEDULES}::test_a_page_is_shared_only_once_its_last_key_is_there",),
    ),
    Mutant(
        name="last-page-from-cache",
        fault="a prompt may come from the cache to its end, and nothing is left to compute",
        edits=(
            Edit(
                where=ENGINE,
                old="known = len(seq.tokens) - 1 if seq.is_scored",
                new="known = len(seq.tokens) if seq.is_scored",
            ),
        ),
        tests=(
            f"{SCHEDULES}::test_a_prompt_that_the_cache_holds_to_its_last_page_is_answered_again",
        ),
    ),
    Mutant(
        name="preemption-is-not-counted",
        fault="results from before a preemption count after it",
        edits=(Edit(where=ENGINE, old="\n        seq.num_preemptions += 1\n", new="\n"),),
        tests=("tests/engine/test_preemption.py",),
    ),
    Mutant(
        name="one-draft-too-many",
        fault="a verification commits the first draft that is wrong",
        edits=(
            Edit(
                where=ENGINE,
                old="jnp.argmax(is_wrong, axis=1).astype(jnp.int32)\n",
                new="jnp.minimum(jnp.argmax(is_wrong, axis=1) + 1, num_drafts).astype(jnp.int32)\n",
            ),
        ),
        tests=(f"{SCHEDULES}::test_wrong_drafts_are_never_committed_and_right_ones_are",),
    ),
    Mutant(
        name="start-moves-with-drafts",
        fault="a slot's start moves when a draft is made, a launch before it is verified",
        edits=(
            Edit(
                where=ENGINE,
                old="slots.placed(slot, start + 1 - is_draft,",
                new="slots.placed(slot, start + 1,",
            ),
        ),
        tests=(f"{SCHEDULES}::test_wrong_drafts_are_never_committed_and_right_ones_are",),
    ),
    Mutant(
        name="drafts-are-not-forgotten",
        fault="a verification leaves the count of a slot's drafts as it was",
        edits=(
            Edit(
                where=ENGINE,
                old="slots.placed(slot, start + num_accepted + 1)",
                new="slots.placed(slot, start + num_accepted + 1, num_drafts)",
            ),
        ),
        tests=(f"{SCHEDULES}::test_wrong_drafts_are_never_committed_and_right_ones_are",),
    ),
    Mutant(
        name="draft-model-has-holes",
        fault="a draft model does not run the last draft of a window that was accepted whole",
        edits=(
            Edit(
                where=ENGINE,
                old="jnp.stack([first - 1, first], axis=1)",
                new="jnp.stack([jnp.full_like(first, -1), first], axis=1)",
            ),
        ),
        tests=(f"{SPECULATION}::test_a_draft_model_that_agrees_has_no_hole_in_its_cache",),
    ),
    Mutant(
        name="head-has-holes",
        fault="a head keeps its own entries of accepted drafts, and reads no hidden state of them",
        edits=(
            Edit(
                where=ENGINE,
                old="is_token = (start[:, None] >= 0) & (step_idx < count[:, None])",
                new="is_token = (start[:, None] >= 0) & (step_idx == count[:, None] - 1)",
            ),
        ),
        tests=("tests/engine/test_eagle.py::test_drafts_are_those_of_the_head_on_the_whole_text",),
    ),
    Mutant(
        name="draft-model-misses-tokens",
        fault="a draft model does not read what was made while drafts were off",
        edits=(
            Edit(
                where=ENGINE,
                old="tuple(call for row in missed for call in self._catch_up(row))",
                new="tuple(call for row in missed[:0] for call in self._catch_up(row))",
            ),
        ),
        tests=(
            f"{SPECULATION}::test_drafts_stop_at_high_batch_and_begin_again_with_what_was_missed",
        ),
    ),
    Mutant(
        name="new-pages-are-not-told",
        fault="a decode step is laid out as the last one was, though a sequence has a new page",
        edits=(
            Edit(
                where=ENGINE,
                old="row.num_preemptions, len(seq.pages), seq.held",
                new="row.num_preemptions, seq.held",
            ),
        ),
        tests=(f"{SCHEDULES}::test_wrong_drafts_are_never_committed_and_right_ones_are",),
    ),
    Mutant(
        name="local-pages-are-not-told",
        fault="a decode step is laid out as the last one was, though local layers have other pages",
        edits=(
            Edit(
                where=ENGINE,
                old="row.num_preemptions, len(seq.pages), seq.held",
                new="row.num_preemptions, len(seq.pages)",
            ),
        ),
        tests=("tests/engine/test_local_pages.py",),
    ),
    Mutant(
        name="local-page-given-away-early",
        fault="a local page goes to others while a token of the sequence still reads it",
        edits=(
            Edit(
                where=ENGINE,
                old="return max(0, position - self._reach + 1) // self._page_len",
                new="return max(0, position - self._reach + 2) // self._page_len",
            ),
        ),
        tests=("tests/engine/test_local_pages.py",),
    ),
    Mutant(
        name="prefix-without-local-pages",
        fault="a prefix is taken from the cache though its local pages are gone",
        edits=(
            Edit(
                where=ENGINE,
                old="return pages if self._local is None else pages[",
                new="return pages or pages[",
            ),
        ),
        tests=("tests/engine/test_scheduler.py",),
    ),
    Mutant(
        name="requests-leak",
        fault="the engine never forgets a request's sequences",
        edits=(
            Edit(where=ENGINE, old=".pop(seq.request_id, None)", new=".get(seq.request_id, None)"),
        ),
        tests=(f"{SCHEDULES}::test_an_engine_at_rest_knows_no_request",),
    ),
    Mutant(
        name="roundings-may-be-left-out",
        fault="programs with a claim are compiled with the options of those without",
        edits=(
            Edit(
                where=ENGINE,
                old='if key.mode == "fast" else EXACT_OPTIONS,\n            operands=self',
                new='if key.mode == "fast" else FAST_OPTIONS,\n            operands=self',
            ),
        ),
        tests=("tests/engine/test_compile_options.py",),
    ),
    Mutant(
        name="stop-string-off-by-one",
        fault="text ends before the last character of its stop string, not before the first",
        edits=(
            Edit(where=ENGINE, old="return end + minus_len, end\n", new="return end - 1, end\n"),
        ),
        tests=("tests/engine/test_text.py",),
    ),
    Mutant(
        name="stop-string-held-too-short",
        fault="the last character but one of a stop string is released",
        edits=(
            Edit(
                where=ENGINE,
                old="longest = min(len(text), len(stop) - 1)",
                new="longest = min(len(text), len(stop) - 2)",
            ),
        ),
        tests=("tests/engine/test_text.py",),
    ),
    Mutant(
        name="residual-of-another-token",
        fault="the last layer of a prefill takes the residual stream of the first wanted token",
        edits=(
            Edit(
                where="detjax/models/layers.py",
                old="    row = jnp.arange(batch, dtype=jnp.int32) * length + wanted\n",
                new="    row = jnp.arange(batch, dtype=jnp.int32) * length + wanted[0]\n",
            ),
        ),
        tests=(
            "tests/models/test_wanted_rows.py"
            "::test_the_wanted_tokens_are_bitwise_batch_invariant_and_path_consistent",
        ),
    ),
    Mutant(
        name="written-keys-left-out",
        fault="of a last page too few keys are loaded",
        edits=(
            Edit(
                where=f"{KERNELS}/attention/sm90_decode_run.py",
                old="        num_loaded = lax.div(num_written + (at_once - 1), "
                "jnp.int32(at_once)) * at_once\n",
                new="        num_loaded = lax.div(num_written, jnp.int32(at_once)) * at_once\n"
                "        num_loaded = jnp.maximum(num_loaded, at_once)\n",
            ),
        ),
        tests=(
            "tests/pallas_kernels/test_attention_sm90.py"
            "::test_loading_the_written_keys_of_a_last_page_is_bitwise_schedule_invariant",
        ),
    ),
    Mutant(
        name="gates-of-another-token",
        fault="a cluster gates all tokens of a window by the gates of the first",
        edits=(
            Edit(
                where=f"{KERNELS}/attention/sm90_decode_cluster.py",
                old="                    seq * job.query_len + token,\n",
                new="                    seq * job.query_len,\n",
            ),
        ),
        tests=(
            "tests/pallas_kernels/test_attention_sm90.py"
            "::test_gates_inside_decode_have_the_bits_of_a_launch_of_their_own",
        ),
    ),
    Mutant(
        name="unrounded-keys-of-a-chunk",
        fault="a chunk attends to its own keys and values before they are rounded to float8",
        edits=(
            Edit(
                where=f"{KERNELS}/attention/reference.py",
                old="    q, pages = rope_into_cache(qkv, ",
                new="    from detjax.pallas_kernels import float8_cache\n\n"
                "    wide = float8_cache.widened(place.pages, qkv.dtype)\n"
                "    place = place._replace(pages=wide)\n"
                "    q, pages = rope_into_cache(qkv, ",
            ),
            Edit(
                where=f"{KERNELS}/attention/reference.py",
                old="    return out, pages",
                new="    return out, float8_cache.narrow_rows(pages)",
            ),
        ),
        tests=(f"{FLOAT8_CACHE}::test_every_query_attends_to_rounded_keys_of_its_own_chunk_too",),
    ),
    Mutant(
        name="float8-toward-zero",
        fault="keys and values are cut to float8, not rounded to nearest",
        edits=(
            Edit(
                where=f"{KERNELS}/float8_cache.py",
                old="    kept = jnp.clip(x.astype(jnp.float32), -LARGEST_FLOAT8, LARGEST_FLOAT8)\n",
                new="    kept = jnp.clip(x.astype(jnp.float32), -LARGEST_FLOAT8, LARGEST_FLOAT8)\n"
                "    kept = lax.bitcast_convert_type(kept, jnp.uint32) & jnp.uint32(0xFFF00000)\n"
                "    kept = lax.bitcast_convert_type(kept, jnp.float32)\n",
            ),
        ),
        tests=(f"{FLOAT8_CACHE}::test_each_bfloat16_becomes_the_nearest_float8",),
    ),
    Mutant(
        name="weight-with-a-correction",
        fault="a router of sigmoids weighs experts by what it chose them by",
        edits=(
            Edit(
                where=f"{KERNELS}/moe/portable.py",
                old="jnp.take_along_axis(scores[:num_rows], expert_ids, axis=1)",
                new="jnp.take_along_axis(ranked[:num_rows], expert_ids, axis=1)",
            ),
        ),
        tests=(f"{SIGMOID_ROUTER}::test_the_choice_and_its_weights_are_as_specified",),
    ),
    Mutant(
        name="state-of-a-failed-draft",
        fault="a step of linear attention begins at whatever state its block has",
        edits=(
            Edit(
                where=f"{KERNELS}/delta_rule/sm90_plan.py",
                old="jnp.where(is_there & (first > start), first, start)",
                new="jnp.where(first > start, first, start)",
            ),
        ),
        tests=(f"{DELTA_RULE}::test_a_step_begins_at_a_state_only_behind_the_token_before",),
    ),
    Mutant(
        name="state-nobody-has-written",
        fault="a copy of a prompt does not wait for the states of the prompt in its launch",
        edits=(
            Edit(
                where=f"{KERNELS}/delta_rule/sm90_plan.py",
                old="    root = jnp.where(root >= 0, root, rows)\n",
                new="    root = rows\n",
            ),
        ),
        tests=(f"{DELTA_RULE}::test_a_sequence_follows_the_one_that_writes_its_page",),
    ),
    Mutant(
        name="key-of-another-head",
        fault="decode in one launch keeps another head of the new token as its key and value",
        edits=(
            Edit(
                where=f"{KERNELS}/attention/sm90_new_token.py",
                old="new.group, num_heads + self.kv_head\n",
                new="new.group, num_heads + new.kv_heads - 1 - self.kv_head\n",
            ),
        ),
        tests=(
            "tests/pallas_kernels/test_attention_sm90.py"
            "::test_new_tokens_inside_decode_have_the_bits_of_two_kernels",
        ),
    ),
    Mutant(
        name="kept-of-other-code",
        fault="an executable is read whatever code is loaded",
        edits=(
            Edit(
                where="detjax/compilation/kept_executables.py",
                old="        loaded_code_hash(root, *made_from, asked=asked),\n",
                new="        loaded_code_hash('detjax.array_types', *made_from),\n",
            ),
        ),
        tests=("tests/compilation/test_kept_executables.py::test_a_constant_that_was_set_counts",),
    ),
    Mutant(
        name="kept-of-many-gpus",
        fault="executables of four GPUs are read, which none have run",
        edits=(
            Edit(
                where="detjax/compilation/kept_executables.py",
                old="    return num_devices <= 2 or",
                new="    return num_devices <= 8 or",
            ),
        ),
        tests=(
            "tests/compilation/test_kept_executables.py::test_of_gpus_at_most_two_have_a_folder",
        ),
    ),
    Mutant(
        name="compiled-in-another-order",
        fault="a check waits for programs that are compiled last",
        edits=(
            Edit(
                where="detjax/engine/running/ready_programs.py",
                old="wanted: list[AnyKey] = [*self._as_checked(keys),",
                new="wanted: list[AnyKey] = [*keys,",
            ),
        ),
        tests=("tests/engine/test_self_check.py::test_a_start_compiles_in_the_order_of_the_check",),
    ),
    Mutant(
        name="walked-for-each-program",
        fault="each program of one request waits for a hash of the loaded code of its own",
        edits=(
            Edit(
                where="detjax/engine/running/ready_programs.py",
                old="pool.submit(self._get, key, asked) for",
                new="pool.submit(self._get, key) for",
            ),
        ),
        tests=(
            "tests/compilation/test_kept_executables.py::test_programs_of_one_request_share_a_hash_of_the_code",
        ),
    ),
    Mutant(
        name="kernels-by-shapes-alone",
        fault="a kernel that was lowered before is taken for another of the same shapes",
        edits=(
            Edit(
                where="detjax/compilation/lowered_kernels.py",
                old="        tuple(sorted(params.items())), tuple(ctx.avals_in)",
                new="        tuple(ctx.avals_in)",
            ),
        ),
        tests=("tests/compilation/test_lowered_kernels.py::test_another_kernel_is_lowered",),
    ),
    Mutant(
        name="kept-without-its-dialect",
        fault="a program all of whose kernels were lowered before cannot be read",
        edits=(
            Edit(
                where="detjax/compilation/lowered_kernels.py",
                old="        mgpu.dialect.register_dialect(ctx.module_context.context)\n",
                new="",
            ),
        ),
        tests=(
            "tests/compilation/test_lowered_kernels.py"
            "::test_a_program_is_that_of_jax_when_its_kernels_are_kept_too",
        ),
    ),
    Mutant(
        name="dropped-what-failed",
        fault="a kernel that could not be compiled loses its bytecode, so nobody says why",
        edits=(
            Edit(
                where="detjax/compilation/mosaic_kernels.py",
                old="if begun.exception() is None}",
                new="if begun.exception() or begun.done()}",
            ),
        ),
        tests=(
            "tests/compilation/test_mosaic_kernels.py::test_a_kernel_that_was_not_compiled_keeps_its_bytecode",
        ),
    ),
    Mutant(
        name="counted-kernels",
        fault="the count of the process stays in a kernel, so each program compiles its own",
        edits=(
            Edit(
                where="detjax/compilation/mosaic_kernels.py",
                old="        del kernel.operation.attributes[_DUMP_NAME]\n",
                new="        pass\n",
            ),
        ),
        tests=(
            "tests/compilation/test_mosaic_kernels.py::test_programs_share_what_computes_the_same",
        ),
    ),
    Mutant(
        name="kernels-not-waited-for",
        fault="a program is compiled while others are still at its kernels",
        edits=(
            Edit(
                where="detjax/compilation/mosaic_kernels.py",
                old="in waited_for.items() if begun.exception() is None}",
                new="in waited_for.items()}",
            ),
        ),
        tests=(
            "tests/compilation/test_mosaic_kernels.py::test_each_kernel_is_compiled_once_and_waited_for",
        ),
    ),
    Mutant(
        name="unproven-ranks",
        fault="more ranks exchange in their products than have been seen to",
        edits=(
            Edit(
                where="detjax/parallel/exchange.py",
                old="MAX_TILE_RANKS = 4\n",
                new="MAX_TILE_RANKS = 8\n",
            ),
        ),
        tests=("tests/parallel/test_exchange.py::test_what_ranks_exchange_themselves",),
    ),
    Mutant(
        name="ended-by-a-signal",
        fault="a CPU is asked for copies of results, and the interpreter may end meanwhile",
        edits=(
            Edit(
                where=ENGINE,
                old='    return device.platform == "cpu"\n',
                new='    return device.platform == "host"\n',
            ),
        ),
        tests=("tests/engine/test_end_of_process.py::test_a_process_ends_while_a_program_runs",),
    ),
)


def find(tree: Path, edit: Edit) -> Path:
    """The one file in which the text stands, exactly once.

    Raises:
        MutantError: If there is none, or more than one place.
    """
    where = tree / edit.where
    files = [where] if where.is_file() else sorted(where.rglob("*.py"))
    counts = {path: path.read_text().count(edit.old) for path in files}
    found = [path for path, count in counts.items() for _ in range(count)]
    if len(found) != 1:
        places = ", ".join(str(path.relative_to(tree)) for path in found) or "nowhere"
        raise MutantError(f"{edit.old!r} stands {len(found)} times in {edit.where}: {places}")
    return found[0]


def copy_tree(to: Path, mutant: Mutant | None) -> Path:
    """Copy the tree, with a fault in it."""
    tree = Path(shutil.copytree(ROOT, to / "tree", ignore=LEFT_OUT))
    for edit in mutant.edits if mutant else ():
        path = find(tree, edit)
        path.write_text(path.read_text().replace(edit.old, edit.new))
    return tree


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of a fault: `is_found` by `found_by`, or why not."""

    mutant: Mutant
    is_found: bool
    says: str
    wall_s: float


def run_tests(tree: Path, tests: Sequence[str], *, limit_s: float) -> subprocess.CompletedProcess:
    """Run tests of a copy on the package of that copy."""
    environ = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [
        sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=line",
        "-m", "not nightly", *tests,
    ]  # fmt: skip
    imported = subprocess.run(
        [sys.executable, "-c", "import detjax; print(detjax.__file__)"],
        cwd=tree, env=environ, capture_output=True, text=True, check=True,
    )  # fmt: skip
    if not Path(imported.stdout.strip()).is_relative_to(tree):
        raise MutantError(f"tests of {tree} would import {imported.stdout.strip()}")
    return subprocess.run(
        command, cwd=tree, env=environ, capture_output=True, text=True, timeout=limit_s, check=False
    )


def try_out(mutant: Mutant, *, limit_s: float) -> Outcome:
    """Make a fault and see whether its tests find it."""
    begin_s = time.monotonic()

    def outcome(is_found: bool, says: str) -> Outcome:
        wall_s = time.monotonic() - begin_s
        return Outcome(mutant=mutant, is_found=is_found, says=says, wall_s=wall_s)

    with tempfile.TemporaryDirectory(prefix="detjax-mutant-") as folder:
        try:
            done = run_tests(copy_tree(Path(folder), mutant), mutant.tests, limit_s=limit_s)
        except MutantError as error:
            return outcome(False, str(error))
        except subprocess.TimeoutExpired:
            return outcome(False, f"hangs: no test failed in {limit_s:.0f} s")
    failed = re.search(r"^FAILED \S*?::(\S+)", done.stdout, re.MULTILINE)
    if done.returncode == 1 and failed:
        return outcome(True, failed[1])
    if done.returncode == 0:
        return outcome(False, "survives")
    return outcome(False, f"pytest ended with {done.returncode}: {done.stdout[-300:]}")


def show(console: Console, outcomes: Sequence[Outcome]) -> None:
    """A table of all faults."""
    table = Table("fault", "what is wrong", "found by", "s")
    for outcome in outcomes:
        says = outcome.says if outcome.is_found else f"[bold red]{outcome.says}[/]"
        table.add_row(outcome.mutant.name, outcome.mutant.fault, says, f"{outcome.wall_s:.0f}")
    console.print(table)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-k", metavar="NAME", default="", help="faults whose name contains NAME")
    parser.add_argument("--list", action="store_true", help="name the faults and end")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time (default: 1)")
    parser.add_argument("--limit-s", type=float, default=600, help="seconds for the tests of one")
    args = parser.parse_args(argv)
    if args.jobs < 1:
        parser.error(f"--jobs {args.jobs} must be at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Try every fault; 0 if all were found."""
    args, console = parse_args(argv), Console()
    chosen = [mutant for mutant in MUTANTS if args.k in mutant.name]
    if not chosen:
        console.print(f"no fault's name contains {args.k!r}; --list names them")
        return 1
    if args.list:
        table = Table("fault", "what is wrong", "tests")
        for mutant in chosen:
            table.add_row(mutant.name, mutant.fault, "\n".join(mutant.tests))
        console.print(table)
        return 0
    with tempfile.TemporaryDirectory(prefix="detjax-mutants-") as folder:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(folder) / "programs"))
        tests = sorted({test for mutant in chosen for test in mutant.tests})
        console.print(f"{len(tests)} tests without a fault ...")
        limit_s = args.limit_s * len(tests)
        sound = run_tests(copy_tree(Path(folder), None), tests, limit_s=limit_s)
        if sound.returncode != 0:
            console.print(sound.stdout[-3000:], markup=False)
            console.print("[bold red]the tests fail without a fault[/]")
            return 1
        with ThreadPoolExecutor(args.jobs) as pool:
            outcomes = []
            for outcome in pool.map(lambda m: try_out(m, limit_s=args.limit_s), chosen):
                console.print(f"{outcome.mutant.name}: {outcome.says}", markup=False)
                outcomes.append(outcome)
    show(console, outcomes)
    survivors = [outcome for outcome in outcomes if not outcome.is_found]
    console.print(f"{len(outcomes)} faults, {len(survivors)} not found")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
