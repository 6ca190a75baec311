# SPDX-License-Identifier: Apache-2.0
"""What is told about a run: what decides its bits, where the time went, and its digests."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from detjax.cli.arguments import BUNDLED, GenerateArgs, sampling_params
from detjax.cli.check import CheckResult
from detjax.cli.display import Display
from detjax.cli.model import EngineShape, OpenModel
from detjax.cli.output import digest_of_all, json_entry
from detjax.cli.run import RunResult
from detjax.models.config import ModelConfig


def card(
    args: GenerateArgs, folder: Path, config: ModelConfig, model: OpenModel, shape: EngineShape
) -> dict[str, str]:
    """Return what runs, and what decides its bits."""
    name = f"{folder.name}, which comes with the package" if args.model == BUNDLED else args.model
    return {
        "model": f"{name}: {config.family}, {config.num_layers} layers of {config.hidden_size}, "
        f"vocabulary {config.vocab_size}, context {config.max_position_embeddings}",
        "numerics": f"{args.dtype} weights, {args.compute} compute, "
        f"fingerprint {model.fingerprint}",
        "backend": f"{model.backend} ({model.backend_reason})",
        "mesh": f"dp {args.dp} x tp {args.tp}",
        "batch": f"{shape.batch_size} at once, prompts in chunks of {shape.prefill_chunk} tokens, "
        f"room for {shape.max_len}",
    }


def run_stats(result: RunResult, load_s: float) -> dict[str, int | float]:
    """Return where the time went, as JSON has it."""
    in_engine = dataclasses.asdict(result.stats)
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
    display.facts(
        {
            "load": f"{stats['load_s']:.2f} s",
            "compile": f"{stats['compile_s']:.2f} s",
            "prefill": _rate(stats["prefill_tokens"], stats["prefill_s"]),
            "decode": _rate(stats["decode_tokens"], stats["decode_s"]),
            "first token": f"{stats['first_token_s']:.2f} s after the process started",
        }
    )
    if not with_digests:
        return
    for record in result.records:
        done = record.completion
        display.line(
            f"digest {done.digest()} prompt {done.request_idx}, sample {done.sample_idx}: "
            f"{len(done.token_ids)} tokens, {done.finish_reason.value}"
        )
    if len(result.records) > 1:
        display.line(f"digest {digest_of_all(result.records)} of all {len(result.records)}")


def _rate(num_tokens: int | float, seconds: int | float) -> str:
    rate = f", {num_tokens / seconds:.1f} tokens/s" if seconds > 0 and num_tokens else ""
    return f"{num_tokens:.0f} tokens in {seconds:.2f} s{rate}"
