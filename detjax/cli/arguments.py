# SPDX-License-Identifier: Apache-2.0
"""The options of the command: one field each, which holds its default and its line of `--help`."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from detjax.cli.errors import BITS_DIFFER, InputError
from detjax.serving.request import SamplingParams

BUNDLED = "bundled"
NO_CACHE = "none"
NO_CAST = "none"  # that of detjax.numerics, which imports JAX

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


_SAMPLING = SamplingParams()
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
    max_tokens: int = _option(
        _SAMPLING.max_tokens,
        _SAMPLES,
        "most tokens of a completion; the end of the model's context ends it too",
    )
    temperature: float = _option(
        _SAMPLING.temperature,
        _SAMPLES,
        "0 takes the most likely token each time; higher is more varied",
        metavar="T",
    )
    top_k: int = _option(
        _SAMPLING.top_k,
        _SAMPLES,
        "keep the K most likely tokens; 0 keeps all",
        metavar="K",
    )
    top_p: float = _option(
        _SAMPLING.top_p,
        _SAMPLES,
        "keep the fewest most likely tokens that have this probability together",
        metavar="P",
    )
    min_p: float = _option(
        _SAMPLING.min_p,
        _SAMPLES,
        "drop tokens less likely than this fraction of the most likely one",
        metavar="P",
    )
    seed: int = _option(
        _SAMPLING.seed,
        _SAMPLES,
        "same seed, same noise, whatever else runs",
        metavar="S",
    )
    n: int = _option(
        _SAMPLING.n,
        _SAMPLES,
        "different sequences a prompt; they need a temperature above 0 to differ",
    )
    stop: tuple[str, ...] = _option(
        (),
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
        "auto",
        _NUMERICS,
        "which kernels: portable runs anywhere, sm90 on Hopper GPUs; auto goes by the hardware",
        choices=("auto", "portable", "sm90"),
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
    batch_size: int = _option(
        8,
        _SCHEDULE,
        "completions that are made at once; a multiple of --dp",
    )
    prefill_chunk: int = _option(64, _SCHEDULE, "prompt tokens that are read at once")
    mode: str = _option(
        "invariant",
        _SCHEDULE,
        "invariant: every step uses canonical kernels. dvr: fast steps draft tokens, canonical "
        "ones verify them in windows, and only what is verified is shown: the same bits (on Hopper "
        "with 8-bit drafts alone, as canonical steps are quicker than full drafts). fast: "
        "XLA's own kernels, whose bits depend on the batch; to compare with",
        choices=("invariant", "dvr", "fast"),
    )
    draft_weights: str = _option(
        "full",
        _SCHEDULE,
        "with --mode dvr: draft with weights of 8 bits, which are quicker to read and change no "
        "bit of the answer",
        choices=("full", "int8", "float8_e4m3fn"),
    )
    decode_steps: int = _option(
        1,
        _SCHEDULE,
        "tokens of a completion in one launch; pays where a step takes the host longer than the "
        "device (small models); they appear together; with --mode dvr at most --verify-window - 1",
    )
    prompt_lookup: bool = _option(
        False,
        _SCHEDULE,
        "with --mode invariant: verify what followed the same tokens earlier in the text, several "
        "tokens a step; pays where text repeats",
    )
    verify_window: int = _option(
        32,
        _SCHEDULE,
        "tokens of a verified window: more cost less a token, and are rolled back more",
    )
    verify_rows: int = _option(8, _SCHEDULE, "windows that are verified at once, in each replica")
    cache_pages: int = _option(
        0,
        _SCHEDULE,
        "pages of the key and value cache, a multiple of --dp. Where they run out, completions are "
        "set aside and computed again",
        default_text="enough for --batch-size completions of full length",
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
    logprobs: int = _option(
        _SAMPLING.num_top_logprobs,
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
    check: bool = _option(
        False,
        _CHECK,
        f"compare the runs bit by bit; exit with {BITS_DIFFER} and the first differences",
    )


def sampling_params(args: GenerateArgs) -> SamplingParams:
    """Return the sampling options.

    Raises:
        InputError: If one is out of range.
    """
    try:
        return SamplingParams(
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            min_p=args.min_p,
            seed=args.seed,
            n=args.n,
            num_top_logprobs=args.logprobs,
        )
    except ValueError as error:
        name, _, rest = str(error).partition("=")
        flag = name.replace("num_top_logprobs", "logprobs").replace("_", "-")
        raise InputError(f"--{flag} {rest}") from error
