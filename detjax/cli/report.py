# SPDX-License-Identifier: Apache-2.0
"""What is told about a run: what decides its bits, where the time went, and its digests."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from detjax.cli.arguments import BUNDLED, NO_CAST, GenerateArgs, sampling_params
from detjax.cli.check import CheckResult
from detjax.cli.display import Display
from detjax.cli.model import EngineShape, OpenModel
from detjax.cli.output import digest_of_all, json_entry
from detjax.cli.run import RunResult
from detjax.models.config import ModelConfig
from detjax.serving.metrics import EngineStats

_MODES = {
    "invariant": "invariant: every step uses canonical kernels",
    "dvr": "dvr: drafts by fast kernels, verified by canonical ones",
    "fast": "fast: no claim; the digests below may differ from run to run",
}


def card(
    args: GenerateArgs, folder: Path, config: ModelConfig, model: OpenModel, shape: EngineShape
) -> dict[str, str]:
    """Return what runs, and what decides its bits."""
    name = f"{folder.name}, which comes with the package" if args.model == BUNDLED else args.model
    cast = "" if model.weight_cast == NO_CAST else f" (cast from {model.weight_cast})"
    return {
        "model": f"{name}: {config.family}, {config.num_layers} layers of {config.hidden_size}, "
        f"vocabulary {config.vocab_size}, context {config.max_position_embeddings}",
        "numerics": f"{args.dtype} weights{cast}, {args.compute} compute, "
        f"fingerprint {model.fingerprint}",
        "mode": _MODES[shape.mode],
        "backend": f"{model.backend} ({model.backend_reason})",
        "mesh": f"dp {args.dp} x tp {args.tp}",
        "batch": f"{shape.batch_size} at once, prompts in chunks of {shape.prefill_chunk} tokens, "
        f"room for {shape.max_len}",
    }


def run_stats(result: RunResult, load_s: float) -> dict[str, int | float]:
    """Return where the time went, as JSON has it."""
    in_engine = result.stats.numbers()
    return {"load_s": load_s, **in_engine, "first_token_s": result.first_token_s}


def document(
    args: GenerateArgs,
    folder: Path,
    result: RunResult,
    model: OpenModel,
    stats: Mapping[str, int | float],
    check: CheckResult | None,
) -> dict[str, Any]:
    """Return the one document of `--format json`."""
    entry = {
        "model": folder.name if args.model == BUNDLED else args.model,
        "fingerprint": model.fingerprint,
        "weight_cast": model.weight_cast,
        "backend": model.backend,
        "dp": args.dp,
        "tp": args.tp,
        "sampling": dataclasses.asdict(sampling_params(args)) | {"stop": list(args.stop)},
        "completions": [json_entry(record, model.fingerprint) for record in result.records],
        "digest": digest_of_all(result.records),
        "stats": dict(stats),
    }
    if check is not None:
        entry["check"] = {"num_runs": check.num_runs, "differences": list(check.lines)}
    return entry


def show_end(
    result: RunResult, stats: Mapping[str, int | float], display: Display, *, with_digests: bool
) -> None:
    """Write the digests and where the time went."""
    running_s = result.stats.step_s.total - result.stats.compile_s
    facts = {
        "load": f"{stats['load_s']:.2f} s",
        "compile": f"{stats['compile_s']:.2f} s",
        "prompts": f"{stats['prompt_tokens']} tokens, {stats['prefix_tokens']} of them cached",
        "completions": _rate(stats["decode_tokens"], running_s),
        "first token": f"{stats['first_token_s']:.2f} s after the process started",
    }
    if stats["num_windows"]:
        facts["drafts"] = (
            f"{stats['draft_tokens']}, {stats['acceptance']:.1%} accepted, "
            f"{stats['num_rollbacks']} of {stats['num_windows']} windows rolled back"
        )
    display.facts(facts)
    if not with_digests:
        return
    for record in result.records:
        done = record.completion
        display.line(
            f"digest {done.digest()} prompt {done.request_idx}, sequence {done.sequence_idx}: "
            f"{len(done.token_ids)} tokens, {done.finish_reason.value}"
        )
    if len(result.records) > 1:
        display.line(f"digest {digest_of_all(result.records)} of all {len(result.records)}")


def _rate(num_tokens: int | float, seconds: int | float) -> str:
    rate = f", {num_tokens / seconds:.1f} tokens/s" if seconds > 0 and num_tokens else ""
    return f"{num_tokens:.0f} tokens in {seconds:.2f} s{rate}"


def show_stats(stats: EngineStats, display: Display) -> None:
    """Write everything that the engine counted."""
    display.table(
        "engine",
        ("what", "value"),
        (
            (name, f"{value:.6f}" if isinstance(value, float) else value)
            for name, value in stats.numbers().items()
        ),
    )
