# SPDX-License-Identifier: Apache-2.0
"""What was verified, claim by claim: docs/verification.md, from tests and committed rows.

A claim has tests, which run without a GPU, and rows of a benchmark that compares bits on GPUs. The
newest rows count: those of the last date, and of them those of the last commit. A row in which
something differs is refused, so the page cannot be written over it.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.report import rows as committed
from benchmarks.report.mesh import BITS, read_impl
from benchmarks.report.rows import GPUS, listed, model_name, runs, table

NOT_RUN = "not run on a GPU"


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """Rows that show a claim on a GPU.

    Attributes:
        command: Of the benchmark.
        subject: Of its rows.
        counts: Whether a row is about the claim.
        num_different: Of a row, how much differs; anything but 0 refuses the report.
        sizes: What the newest rows compared, in words.
        folders: Of results, where rows are.
        machine: Between what a row compares; empty if it is the row's GPU alone.
        is_of_one_commit: Whether rows of one date and several commits are several comparisons, of
            which the last counts; else they are parts of one.
    """

    command: str
    subject: str
    counts: Callable[[dict], bool]
    num_different: Callable[[dict], int]
    sizes: Callable[[Sequence[dict]], str]
    folders: tuple[str, ...] = tuple(GPUS)
    machine: str = ""
    is_of_one_commit: bool = True

    def newest(self) -> list[dict]:
        """Rows of the newest run about the claim, of all kinds of GPU; none if there is none.

        Raises:
            ValueError: If something differs in one of them.
        """
        found: list[dict] = []
        for folder in self.folders:
            of_runs = (
                [row for row in run if self.counts(row)]
                for run in runs(self.command, self.subject, folder)
            )
            found += next(filter(None, of_runs), [])
        if not found:
            return []
        last = max(found, key=lambda row: row["date"])  # the first of equals
        of_day = [row for row in found if (row["date"], row["gpu"]) == (last["date"], last["gpu"])]
        last_commit = of_day[-1]["commit"]
        newest = [
            row for row in of_day if row["commit"] == last_commit or not self.is_of_one_commit
        ]
        for row in newest:
            if self.num_different(row):
                raise ValueError(f"bits differ in {row}; the page must not say that they do not")
        return newest


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A claim and what shows it.

    Attributes:
        name: In the vocabulary of docs/numerics.md, or what else is compared.
        tests: Files and functions, as pytest names them.
        evidence: None if no benchmark compares it on a GPU.
    """

    name: str
    tests: tuple[str, ...]
    evidence: Evidence | None


def _total(found: Sequence[dict], name: str) -> str:
    return f"{sum(row[name] for row in found):,}"


def _starts(found: Sequence[dict]) -> str:
    settings = {(row["model"], row["tp"]) for row in found}
    digests = {(row["model"], row["tp"], row["digest"]) for row in found}
    if len(digests) > len(settings):
        raise ValueError(f"starts of {settings} gave {len(digests)} digests")
    cold = sum(row["kind"] == "cold" for row in found)
    models = listed(sorted(f"{model_name(model)} at tp {tp}" for model, tp in settings))
    return f"{len(found)} starts of {models}, {cold} with nothing kept: one digest"


def _production(found: Sequence[dict]) -> str:
    longest = max(row["longest_prompt"] for row in found)
    rows_at_once = max(row["most_rows"] for row in found)
    return (
        f"{model_name(found[0]['model'])}: {_total(found, 'compared_tokens')} tokens and logprobs, "
        f"prompts of up to {longest:,} tokens, up to {rows_at_once} sequences at once"
    )


def _dvr(found: Sequence[dict]) -> str:
    windows, rollbacks = _total(found, "windows"), _total(found, "rollbacks")
    return f"{_production(found)}; {windows} windows, {rollbacks} rollbacks"


def _stress(found: Sequence[dict]) -> str:
    return (
        f"{model_name(found[0]['model'])}: {_total(found, 'requests')} requests, "
        f"{_total(found, 'cancelled')} cancelled, {_total(found, 'preempted')} preemptions, "
        f"{_total(found, 'prefix_tokens')} tokens from the prefix cache"
    )


def _meshes(found: Sequence[dict]) -> str:
    meshes = sorted({row["impl"].split(maxsplit=1)[1] for row in found if "impl" in row})
    cases = len({row["case"] for row in found})
    return f"Llama-3.1-8B shapes: {cases} steps on (dp, tp) = {listed(meshes)} against (1,1)"


def _is_on_a_mesh(row: dict) -> bool:
    return bool(row.get("impl")) and read_impl(row["impl"])[1:3] != (1, 1)


def _job(found: Sequence[dict]) -> str:
    row = found[-1]
    return (
        f"{row['model'].replace('llama3_8b', 'Llama-3.1-8B')}: {row['requests']} requests, "
        f"{row['left']} of whose clients left, {row['processes']} processes (tp {row['tp']}) "
        "against one"
    )


def _receipts(found: Sequence[dict]) -> str:
    return (
        f"{model_name(found[0]['model'])}: {_total(found, 'receipts')} receipts of answers in "
        f"batches of {listed(row['batch'] for row in found)}, made again"
    )


def _audit(found: Sequence[dict]) -> str:
    return (
        f"{_total(found, 'tokens')} tokens in {_total(found, 'windows')} windows; one wrong bit "
        f"planted in {len(found)} runs, found in {_total(found, 'control_found')}"
    )


def _float8_steps(found: Sequence[dict]) -> str:
    cases = listed(row["case"] for row in found)
    return f"{model_name(found[0]['model'])}, {cases}: two runs of each, and rows in both batches"


def _cut_model(row: dict) -> str:
    """The model of a row, which may have its first layers alone."""
    layers = row.get("layers", 0)
    return model_name(row["model"]) + (f", {layers} layers" if layers else "")


def _quantised(found: Sequence[dict]) -> str:
    schemes = listed(row["scheme"] for row in found)
    return (
        f"{_cut_model(found[0])}, {schemes}, packed against expanded: "
        f"{_total(found, 'answers')} answers and the hash of weights"
    )


def _w8a8(found: Sequence[dict]) -> str:
    schemes = listed(row["scheme"] for row in found)
    return (
        f"{_cut_model(found[0])}, {schemes}: {_total(found, 'answers')} answers together "
        "and alone, and the hash of weights"
    )


def _speculation(found: Sequence[dict]) -> str:
    batches = listed(sorted({str(row["batch"]) for row in found}, key=int))
    return (
        f"Llama-3.1-8B shapes, {len(found)} runs with a draft model against none, batches of "
        f"{batches}: {_total(found, 'answers')} answers"
    )


def _server(found: Sequence[dict]) -> str:
    rates = listed(sorted({f"{row['rate_per_s']:g}" for row in found}, key=float))
    return (
        f"{model_name(found[0]['model'])}: {_total(found, 'canonical')} answers over HTTP at "
        f"{rates} requests a second against each alone"
    )


def _hopper_bits(found: Sequence[dict]) -> str:
    cases = len({row["case"] for row in found})
    return f"{_total(found, 'elements')} results of {cases} cases of operations"


def _hopper_answers(found: Sequence[dict]) -> str:
    models = len({row["case"] for row in found})
    answers, tokens = _total(found, "answers"), _total(found, "tokens")
    return f"{answers} answers of {models} models, {tokens} tokens and logprobs"


def _part(*, mode: str) -> Callable[[dict], bool]:
    return lambda row: row["mode"] == mode


AUDIT = {
    "command": "proof", "subject": "proof", "counts": lambda row: row["case"] == "audit",
    "num_different": lambda row: row["different"] + (not row["control_found"]),
}  # fmt: skip
PRODUCTION = {
    "command": "production", "subject": "production",
    "num_different": lambda row: row["different"] + row["self_check_differences"],
}  # fmt: skip
ON_A_CPU = {
    "command": "hopper_bits", "counts": lambda row: True,
    "num_different": lambda row: row["different"], "folders": ("cpu",),
    "machine": "H200 and a CPU", "is_of_one_commit": False,
}  # fmt: skip
REFERENCE = "tests/pallas_kernels/test_reference.py"
ANSWERS = "tests/invariance/test_answers.py::test_answers_are_bitwise"
CLAIMS = (
    Claim(
        name="run-invariant",
        tests=(f"{ANSWERS}_run_invariant_in_a_second_process",),
        evidence=Evidence(
            command="start", subject="start", counts=lambda row: True,
            num_different=lambda row: 0, sizes=_starts,
        ),
    ),
    Claim(
        name="batch-invariant",
        tests=(f"{ANSWERS}_batch_invariant",),
        evidence=Evidence(counts=_part(mode="invariant"), sizes=_production, **PRODUCTION),
    ),
    Claim(
        name="path-consistent",
        tests=(
            "tests/invariance/test_answers.py::"
            "test_decode_is_bitwise_path_consistent_with_prefill",
            "tests/training/test_forward.py::"
            "test_training_forward_is_bitwise_path_consistent_with_the_engine",
        ),
        evidence=Evidence(counts=_part(mode="invariant"), sizes=_production, **PRODUCTION),
    ),
    Claim(
        name="schedule-invariant",
        tests=(
            f"{ANSWERS}_schedule_invariant",
            "tests/invariance/test_schedules.py::"
            "test_a_page_is_shared_only_once_its_last_key_is_there",
        ),
        evidence=Evidence(
            command="serving", subject="stress", counts=lambda row: row["mode"] != "fast",
            num_different=lambda row: row["wrong"] + row["lost"], sizes=_stress,
        ),
    ),
    Claim(
        name="mesh-invariant",
        tests=(f"{ANSWERS}_mesh_invariant",),
        evidence=Evidence(
            command="mesh", subject="mesh_step_bits", counts=_is_on_a_mesh,
            num_different=lambda row: sum(row.get(name, 0) for name in BITS), sizes=_meshes,
        ),
    ),
    Claim(
        name="machine-invariant, operations",
        tests=(
            f"{REFERENCE}::test_operations_have_the_bits_of_a_gpu",
            f"{REFERENCE}::test_products_have_the_bits_of_the_definition",
        ),
        evidence=Evidence(subject="hopper_bits", sizes=_hopper_bits, **ON_A_CPU),
    ),
    Claim(
        name="machine-invariant, answers",
        tests=(f"{REFERENCE}::test_whole_answers_have_the_bits_of_a_gpu",),
        evidence=Evidence(subject="hopper_answers", sizes=_hopper_answers, **ON_A_CPU),
    ),
    Claim(
        name="several processes",
        tests=(
            "tests/parallel/test_distributed.py::test_processes_are_bitwise_mesh_invariant",
            "tests/engine/test_replicated_engine.py::"
            "test_a_load_with_cancellations_is_bitwise_that_of_lone_requests",
        ),
        evidence=Evidence(
            command="serve_job", subject="serve_job", counts=lambda row: True,
            num_different=lambda row: row["wrong"] + row["lost"] + (not row["same"]), sizes=_job,
        ),
    ),
    Claim(
        name="receipts",
        tests=(
            "tests/proof/test_rerun.py::"
            "test_receipts_replay_in_another_order_and_one_sequence_alone",
            "tests/proof/test_forgery.py::test_no_mutant_passes_and_every_true_receipt_does",
        ),
        evidence=Evidence(sizes=_receipts, **AUDIT),
    ),
    Claim(
        name="audit",
        tests=(
            "tests/proof/test_rerun.py::test_an_audit_is_by_windows_and_finds_the_same_bits",
            "tests/proof/test_rerun.py::test_a_forgery_with_hashes_that_fit_is_found_out",
        ),
        evidence=Evidence(sizes=_audit, **AUDIT),
    ),
    Claim(
        name="quantised weights",
        tests=(
            "tests/models/test_quantization.py::test_answers_are_those_of_the_expanded_folder",
            "tests/models/test_quantization.py::"
            "test_weights_that_stay_packed_give_the_same_answers",
        ),
        evidence=Evidence(
            command="quantized", subject="quantized", counts=lambda row: "different_digests" in row,
            num_different=lambda row: row["different_digests"] + (not row["is_same_hash"]),
            sizes=_quantised,
        ),
    ),
    Claim(
        name="8-bit activations (`--quantized-weights w8a8`)",
        tests=(
            "tests/pallas_kernels/test_w8a8.py::test_no_batchmate_changes_a_bit",
            "tests/pallas_kernels/test_w8a8.py::test_no_order_of_channels_changes_a_bit",
        ),
        evidence=Evidence(
            command="quantized", subject="quantized", counts=lambda row: row["weights"] == "w8a8",
            num_different=lambda row: row["different_alone"] + (not row["is_same_hash"]),
            sizes=_w8a8,
        ),
    ),
    Claim(
        name="a cache of 8 bits (`--kv-cache-dtype fp8`)",
        tests=(
            "tests/invariance/test_float8_cache.py::"
            "test_answers_are_bitwise_batch_and_schedule_invariant",
            "tests/pallas_kernels/test_float8_cache.py::"
            "test_every_query_attends_to_rounded_keys_of_its_own_chunk_too",
        ),
        evidence=Evidence(
            command="step_float8_cache", subject="step_bits", counts=lambda row: True,
            num_different=lambda row: not row["same"], sizes=_float8_steps,
        ),
    ),
    Claim(
        name="speculation",
        tests=(
            "tests/engine/test_speculation.py::test_a_draft_model_changes_no_bit",
            "tests/engine/test_speculation.py::test_a_drafter_of_the_host_changes_no_bit",
            "tests/engine/test_eagle.py::test_a_head_changes_no_bit",
            "tests/engine/test_mtp.py::test_a_head_changes_no_bit",
            "tests/engine/test_windows.py::test_several_windows_a_launch_change_no_bit",
        ),
        evidence=Evidence(
            command="speculation", subject="speculation",
            counts=lambda row: row["source"] == "draft_model",
            num_different=lambda row: row["different"], sizes=_speculation,
        ),
    ),
    Claim(
        name="dvr",
        tests=(
            "tests/invariance/test_schedules.py::"
            "test_wrong_drafts_are_never_committed_and_right_ones_are",
        ),
        evidence=Evidence(counts=_part(mode="dvr"), sizes=_dvr, **PRODUCTION),
    ),
    Claim(
        name="server",
        tests=(
            "tests/server/test_batch_invariance.py::"
            "test_one_at_a_time_has_the_bits_of_all_at_once",
        ),
        evidence=Evidence(
            command="serve_load", subject="serve_load", counts=lambda row: row["canonical"] > 0,
            num_different=lambda row: row["wrong"] + row["lost"], sizes=_server,
        ),
    ),
)  # fmt: skip


def _link(test: str) -> str:
    path, _, name = test.partition("::")
    return f"[`{name}`]({path})"


def _certificates() -> list[tuple[str, ...]]:
    """A row for each committed certificate of a GPU.

    Raises:
        ValueError: If one of them has not proven all of its claims.
    """
    found = []
    results = committed.RESULTS
    for path in sorted(path for gpu in GPUS for path in (results / gpu).glob("certificate*.json")):
        told = json.loads(path.read_text())
        facts, cases = told["facts"], [one for one in told["outcomes"] if not one["is_control"]]
        if not told["proven"] or any(one["num_different"] for one in cases):
            raise ValueError(f"{path} has not proven all; the page must not say that it has")
        compared = (
            f"{facts['model']}: {_total(cases, 'num_compared')} comparisons in {len(cases)} cases; "
            f"{len(told['outcomes']) - len(cases)} controls differ"
        )
        link = f"[{path.parent.name}/{path.name}]({path.relative_to(results.parents[1])})"
        found.append((
            f"a certificate: {listed(told['claims'])}", link, compared, GPUS[path.parent.name], "",
            f"source {facts['build: source'][:8]}", "`detjax.certify`",
        ))  # fmt: skip
    return found


def section() -> list[str]:
    """A row for each claim, and for each certificate."""
    lines = []
    for claim in CLAIMS:
        newest = claim.evidence.newest() if claim.evidence else []
        shown = (NOT_RUN, "", "", "", "")
        if claim.evidence and newest:
            last = newest[-1]
            shown = (
                claim.evidence.sizes(newest),
                claim.evidence.machine or last["gpu"].removeprefix("NVIDIA "), last["date"],
                last["commit"], f"`benchmarks.{claim.evidence.command}`",
            )  # fmt: skip
        lines.append([claim.name, "<br>".join(map(_link, claim.tests)), *shown])
    header = ("claim", "tests", "compared on a GPU", "GPU", "date", "commit", "by")
    return table(header, [*lines, *_certificates()])
