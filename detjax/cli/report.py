# SPDX-License-Identifier: Apache-2.0
"""What is told about a run: what decides its bits, where the time went, and its digests."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from detjax.cli.arguments import GenerateArgs, sampling_params
from detjax.cli.check import CheckResult
from detjax.cli.display import Display
from detjax.cli.model import ModelFiles
from detjax.cli.output import digest_of_all, entry_of
from detjax.cli.prompt_batch import PromptBatch
from detjax.cli.run import RunResult
from detjax.cli.warm import Compiled
from detjax.engine.metrics import EngineStats
from detjax.models.bundled import bundled_model_path
from detjax.models.generation_config import default_sampling

if TYPE_CHECKING:  # imports JAX
    from detjax.llm_config import LLMConfig
    from detjax.proof.identity import Identity


def card(args: GenerateArgs, files: ModelFiles, config: "LLMConfig") -> dict[str, str]:
    """Return what runs, and what decides its bits."""
    folder = files.folder
    is_bundled = folder == bundled_model_path()
    name = f"{folder.name}, which comes with the package" if is_bundled else args.model
    # The context of the files: that of the weights is cut to the longest prompt and completion.
    facts = dataclasses.replace(config, name=name, model=files.config).facts()
    defaults = default_sampling(folder) if args.generation_config == "auto" else {}
    if defaults:
        values = ", ".join(f"{name} {value}" for name, value in defaults.items())
        facts["defaults"] = f"{values} (generation_config.json, where no option says otherwise)"
    return facts


def run_stats(result: RunResult, load_s: float) -> dict[str, int | float]:
    """Return where the time went, as JSON has it."""
    stats = {"load_s": load_s, **result.stats.numbers()}
    if result.first_token_s is not None:
        stats["first_token_s"] = result.first_token_s
    return stats


def document(
    args: GenerateArgs,
    identity: "Identity",
    batch: PromptBatch,
    result: RunResult,
    stats: Mapping[str, int | float],
    check: CheckResult | None,
) -> dict[str, Any]:
    """Return the one document of `--format json`."""
    entry = {
        "model": identity.model,
        "fingerprint": identity.numerics["fingerprint"],
        "weight_cast": identity.model["weight_cast"],
        "backend": identity.build["backend"],
        "dp": args.dp,
        "tp": args.tp,
        "sampling": sampling_params(args).as_dict(),
        "completions": [entry_of(output, batch.extras) for output in result.outputs],
        "digest": digest_of_all(result.outputs),
        "stats": dict(stats),
    }
    if check is not None:
        entry["check"] = {"num_runs": check.num_runs, "differences": list(check.lines)}
    return entry


def show_end(
    result: RunResult, stats: Mapping[str, int | float], display: Display, *, with_digests: bool
) -> None:
    """Write the digests and where the time went."""
    facts = {
        "load": f"{stats['load_s']:.2f} s",
        "compile": f"{stats['compile_s']:.2f} s",
        "prompts": f"{stats['prompt_tokens']} tokens, {stats['prefix_tokens']} of them cached",
        "completions": _rate(stats["decode_tokens"], result.running_s),
    }
    if "first_token_s" in stats:
        facts["first token"] = f"{stats['first_token_s']:.2f} s after the process started"
    if stats["num_windows"]:
        facts["drafts"] = (
            f"{stats['draft_tokens']}, {stats['acceptance']:.1%} accepted, "
            f"{stats['num_rollbacks']} of {stats['num_windows']} windows rolled back"
        )
    display.facts(facts)
    if not with_digests:
        return
    for output in result.outputs:
        done = output.completion
        display.line(
            f"digest {done.digest()} prompt {done.request_idx}, sequence {done.sequence_idx}: "
            f"{len(done.token_ids)} tokens, {done.finish_reason.value}"
        )
    if len(result.outputs) > 1:
        display.line(f"digest {digest_of_all(result.outputs)} of all {len(result.outputs)}")


def _rate(num_tokens: int | float, seconds: int | float) -> str:
    rate = f", {num_tokens / seconds:.1f} tokens/s" if seconds > 0 and num_tokens else ""
    return f"{num_tokens:.0f} tokens in {seconds:.2f} s{rate}"


def show_compiled(compiled: Sequence[Compiled], display: Display) -> None:
    """Write which programs there are now."""
    rows = ((one.name, f"{one.ready_s:.2f}") for one in compiled)
    display.table(f"{len(compiled)} programs", ("program", "ready after, s"), rows)


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
