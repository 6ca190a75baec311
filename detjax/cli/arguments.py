# SPDX-License-Identifier: Apache-2.0
"""The options of the command: one field each, which holds its default and its line of `--help`."""

import dataclasses
import inspect
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from detjax.cli.errors import BITS_DIFFER, InputError, bad_input
from detjax.pallas_kernels.backend import Backend
from detjax.serving.config import DRAFT_WEIGHTS, MODES, SELF_CHECKS, EngineConfig
from detjax.serving.request import SamplingParams

BUNDLED = "bundled"
NO_CACHE = "none"
NO_CAST = "none"  # that of detjax.numerics, which imports JAX
AUTO = "auto"  # that of detjax.llm, which imports JAX
GPU_MEMORY_UTILIZATION = 0.9  # that of detjax.llm, which imports JAX

GROUPS = {
    "model": "Which weights. The default is a small model that comes with the package.",
    "prompts": "What to continue. Prompts of --prompt come first, then those of the file.",
    "sampling": "How each next token is chosen. The same for every prompt.",
    "numerics": "These choose the bits: runs agree if these agree, the build and the hardware.\n"
    "The fingerprint that is printed stands for all of them.",
    "batch, mesh and schedule": "These choose speed and memory. They change no bit, except "
    "--mode fast, which promises nothing.",
    "output": "How completions are written.",
    "check": "See for yourself that the claim holds here.",
}


def _default_cache_dir() -> str:
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return str(Path(root).expanduser() / "detjax")


def _option(
    default: Any,
    group: str,
    text: str,
    *,
    metavar: str = "N",
    choices: Sequence[str] = (),
    default_text: str = "",
    type: type = str,
) -> Any:
    """Describe one option: the field of its value, and its entry in `--help`.

    `type` is that of a value whose default is None.
    """
    if default_text or isinstance(default, int | float | str) and not isinstance(default, bool):
        text = f"{text} (default: {default_text or default})"
    shown = {"choices": tuple(choices)} if choices else {"metavar": metavar}
    metadata = {"group": group, "help": text, "shown": shown, "type": type}
    return field(default=default, metadata=metadata)


def _field(
    of: type,
    name: str,
    group: str,
    text: str = "",
    *,
    default: Any = dataclasses.MISSING,
    metavar: str = "N",
    choices: Sequence[str] = (),
    default_text: str = "",
) -> Any:
    """Describe an option that sets a field of `of`, whose default and description it takes.

    `text` and `default` replace them.
    """
    (its,) = (its for its in dataclasses.fields(of) if its.name == name)
    made = _option(
        its.default if default is dataclasses.MISSING else default,
        group,
        text or _description(of, name),
        metavar=metavar,
        choices=choices,
        default_text=default_text,
    )
    return field(default=made.default, metadata={**made.metadata, "sets": (of, name)})


def _description(of: type, name: str) -> str:
    """What the docstring of a class says of a field, as a line of `--help`."""
    found = re.search(
        rf"^    {name}: (.*?)(?=^    \w+: |^\S|\n\n|\Z)", inspect.getdoc(of) or "", re.M | re.S
    )
    text = " ".join(found[1].split()) if found else ""
    return (text[:1].lower() + text[1:]).removesuffix(".").replace("%", "%%")


_DTYPES = ("bfloat16", "float32")
_MODEL, _PROMPTS, _SAMPLES, _NUMERICS, _SCHEDULE, _OUTPUT, _CHECK = GROUPS


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateArgs:
    """Every option of the command; `--help` and its defaults are made from these fields."""

    model: str = _option(
        BUNDLED,
        _MODEL,
        "folder in Hugging Face format, or a Hugging Face id, which is downloaded once",
        metavar="DIR_OR_ID",
    )
    revision: str | None = _option(
        None,
        _MODEL,
        "branch, tag or commit of a Hugging Face id",
        metavar="REV",
        default_text="its main branch",
    )
    prompt: tuple[str, ...] = _option(
        (),
        _PROMPTS,
        "text to continue; may be given several times. - reads one prompt from standard input "
        "(without its last line end). Write --prompt=-x for a text that begins with a dash",
        metavar="TEXT",
    )
    prompts_file: str | None = _option(
        None,
        _PROMPTS,
        ".txt: a prompt a line. .jsonl: an object a line, with a `prompt`, or with `messages` "
        "([{role, content}, ...]), for which the chat template is used. Blank lines are skipped",
        metavar="FILE",
    )
    chat: bool = _option(
        False, _PROMPTS, "ask each plain prompt as a user, with the model's chat template"
    )
    control_tokens: bool = _option(
        False,
        _PROMPTS,
        "let <|im_end|> and the like, written out in a prompt, be the token of that name; without "
        "it they are text, and only the chat template begins and ends turns",
    )
    max_tokens: int = _field(
        SamplingParams,
        "max_tokens",
        _SAMPLES,
        "most tokens of a completion; the end of the model's context ends it too",
    )
    temperature: float = _field(SamplingParams, "temperature", _SAMPLES, metavar="T")
    top_k: int = _field(SamplingParams, "top_k", _SAMPLES, metavar="K")
    top_p: float = _field(SamplingParams, "top_p", _SAMPLES, metavar="P")
    min_p: float = _field(SamplingParams, "min_p", _SAMPLES, metavar="P")
    seed: int = _field(SamplingParams, "seed", _SAMPLES, metavar="S")
    n: int = _field(SamplingParams, "n", _SAMPLES)
    stop: tuple[str, ...] = _field(
        SamplingParams,
        "stop",
        _SAMPLES,
        "end a completion before this text; may be given several times. The tokens that complete "
        "it stay in token_ids and in the digest",
        metavar="TEXT",
    )
    dtype: str = _option("bfloat16", _NUMERICS, "what weights are stored in", choices=_DTYPES)
    cast_weights: str = _option(
        NO_CAST,
        _NUMERICS,
        "round a checkpoint of float16 or float32 to this dtype, to nearest and ties to even; the "
        "fingerprint says so. Without it float16 goes with --dtype float32 alone",
        choices=(NO_CAST, "bfloat16"),
    )
    compute: str = _option(
        "bfloat16",
        _NUMERICS,
        "what activations and the cache are rounded to; products and sums are float32 always",
        choices=_DTYPES,
        default_text="that of --dtype",
    )
    backend: str = _option(
        AUTO,
        _NUMERICS,
        "which kernels: portable runs anywhere, sm90 on Hopper GPUs; auto goes by the hardware",
        choices=(AUTO, *(backend.value for backend in Backend)),
    )
    tp: int = _option(
        1,
        _SCHEDULE,
        "devices that share each layer; without GPUs, virtual ones. A power of two that divides "
        "the model",
    )
    dp: int = _option(
        1,
        _SCHEDULE,
        "replicas, each on --tp devices, which share the prompts",
    )
    coordinator: str | None = _option(
        None,
        _SCHEDULE,
        "where process 0 of a job of several processes listens; all are started alike but for "
        "--process-id, and process 0 alone writes",
        metavar="HOST:PORT",
        default_text="as SLURM or Kubernetes say, else one process",
    )
    num_processes: int | None = _option(
        None, _SCHEDULE, "processes of the job; they share the --dp times --tp devices", type=int
    )
    process_id: int | None = _option(
        None, _SCHEDULE, "which of them this is, from 0", metavar="I", type=int
    )
    batch_size: int = _field(EngineConfig, "batch_size", _SCHEDULE, default=8)
    prefill_chunk: int = _field(EngineConfig, "prefill_chunk", _SCHEDULE, default=64)
    mode: str = _field(
        EngineConfig,
        "mode",
        _SCHEDULE,
        "invariant: every step uses canonical kernels. dvr: fast steps draft tokens, canonical "
        "ones verify them in windows, and only what is verified is shown: the same bits (on Hopper "
        "with 8-bit drafts alone, as canonical steps are quicker than full drafts). fast: "
        "XLA's own kernels, whose bits depend on the batch; to compare with",
        choices=MODES,
    )
    draft_weights: str = _field(EngineConfig, "draft_weights", _SCHEDULE, choices=DRAFT_WEIGHTS)
    decode_steps: int = _field(EngineConfig, "decode_steps", _SCHEDULE)
    prompt_lookup: bool = _field(EngineConfig, "has_prompt_lookup", _SCHEDULE)
    verify_window: int = _field(EngineConfig, "verify_window", _SCHEDULE)
    verify_rows: int = _field(EngineConfig, "verify_rows", _SCHEDULE)
    cache_pages: int = _field(
        EngineConfig,
        "num_pages",
        _SCHEDULE,
        "pages of the key and value cache, a multiple of --dp. Where they run out, completions are "
        "set aside and computed again",
        default_text="enough for --batch-size completions of full length, on a GPU as many of "
        "these as fit",
    )
    gpu_memory_utilization: float | None = _option(
        None,
        _SCHEDULE,
        "share of a GPU's memory for weights and cache together, of what JAX takes: 75 %% of the "
        "GPU, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise",
        metavar="SHARE",
        default_text=f"{GPU_MEMORY_UTILIZATION}",
        type=float,
    )
    cache_dir: str = _option(
        _default_cache_dir(),
        _SCHEDULE,
        f"where compiled programs are kept, so that the next start is quick; {NO_CACHE} keeps none",
        metavar="DIR",
    )
    format: str = _option(
        "text",
        _OUTPUT,
        "text streams as it is made; json is one document at the end; jsonl is one line for each "
        "completion, in order, as soon as it is complete",
        choices=("text", "json", "jsonl"),
    )
    logprobs: int = _field(
        SamplingParams,
        "num_top_logprobs",
        _OUTPUT,
        "with json and jsonl: also the K most likely tokens at each position, at most 64",
        metavar="K",
    )
    stats: bool = _option(
        False, _OUTPUT, "at the end, show what the engine counted: steps, cache, drafts, latencies"
    )
    trace: str | None = _option(
        None,
        _OUTPUT,
        "write a timeline of the first run, which https://ui.perfetto.dev opens",
        metavar="FILE",
    )
    repeat: int = _option(
        1,
        _CHECK,
        "with --check: run N times, at other batch sizes, orders and chunks, among other "
        "neighbours, with --mode dvr every other run in invariant; completions of the first run "
        "are written",
    )
    self_check: str = _field(
        EngineConfig,
        "self_check",
        _CHECK,
        "start (always is the same here): compare each canonical program with prefill when it is "
        "compiled, and end with an error if a bit differs. off: do not",
        choices=SELF_CHECKS,
    )
    expect_digest: str | None = _option(
        None,
        _CHECK,
        f"exit with {BITS_DIFFER} if the digest of all completions is another than this one, of an "
        "earlier run, as it printed it",
        metavar="HEX",
    )
    check_process: bool = _option(
        False,
        _CHECK,
        "before that, run once in a new process that compiles everything anew, and compare",
    )
    check: bool = _option(
        False,
        _CHECK,
        f"compare the runs bit by bit; exit with {BITS_DIFFER} and the first differences",
    )


def _values(args: GenerateArgs, of: type) -> dict[str, Any]:
    """The options that set fields of `of`, under the names of these."""
    settings = ((its.name, its.metadata.get("sets")) for its in dataclasses.fields(args))
    return {sets[1]: getattr(args, name) for name, sets in settings if sets and sets[0] is of}


def sampling_params(args: GenerateArgs) -> SamplingParams:
    """Return the sampling options.

    Raises:
        InputError: If one is out of range.
    """
    try:
        return SamplingParams(**_values(args, SamplingParams))
    except ValueError as error:
        name, _, rest = str(error).partition("=")
        flag = name.replace("num_top_logprobs", "logprobs").replace("_", "-")
        raise InputError(f"--{flag} {rest}") from error


def engine_config(args: GenerateArgs, *, max_len: int, prefill_chunk: int) -> EngineConfig:
    """Return the engine's options, for prompts and completions of `max_len` tokens together.

    Raises:
        InputError: If one is out of range or does not go with another.
    """
    values = _values(args, EngineConfig)
    values |= {"max_len": max_len, "prefill_chunk": prefill_chunk}
    with bad_input():
        return EngineConfig(**values)
