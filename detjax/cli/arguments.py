# SPDX-License-Identifier: Apache-2.0
"""The options of the command: one field each, which holds its default and its line of `--help`."""

import dataclasses
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from detjax.cli.errors import BITS_DIFFER, InputError, bad_input
from detjax.compilation.source import NO_CACHE as NO_CACHE
from detjax.compilation.source import default_cache_dir
from detjax.engine.config import DRAFT_WEIGHTS, MODES, SELF_CHECKS, EngineConfig
from detjax.engine.requests.sampling_params import LOGPROBS_MODES, NOISES, SamplingParams
from detjax.engine.sampling.structured_output import FORMS, StructuredOutput
from detjax.models.bundled import BUNDLED
from detjax.pallas_kernels.backend import Backend

NO_CAST = "none"  # that of detjax.numerics, which imports JAX
AUTO = "auto"  # that of detjax.opening, which imports JAX
GPU_MEMORY_UTILIZATION = 0.9  # that of detjax.sizing, which imports JAX

GROUPS = {
    "model": "Which weights. The default is a small model that comes with the package.",
    "prompts": "What to continue. Prompts of --prompt come first, then those of the file.",
    "sampling": "How each next token is chosen. A line of --prompts-file may say it for its own.",
    "numerics": "These choose the bits: runs agree if these agree, the build and the hardware.\n"
    "The fingerprint that is printed stands for all of them.",
    "batch, mesh and schedule": "These choose speed and memory. They change no bit, except "
    "--mode fast, which promises nothing.",
    "output": "How completions are written.",
    "check": "See for yourself that the claim holds here.",
}


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

    `type` is that of a value whose default is None, or of each of several.
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
    type: type = str,
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
        type=type,
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
    chat_template: str | None = _option(
        None,
        _MODEL,
        "a Jinja template of conversations, in place of the model's own",
        metavar="FILE",
        default_text="that of the model",
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
        ".txt: a prompt a line. .jsonl: an object a line, with a `prompt`, `prompt_token_ids`, or "
        "`messages` ([{role, content}, ...]), for which the chat template is used; if wanted, an "
        "`id`, `sampling` ({field of SamplingParams: value}), and for the template `tools`, "
        "`chat_template_kwargs`, `add_generation_prompt` and `continue_final_message`. Blank lines "
        "are skipped",
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
    seed: int | None = _field(
        SamplingParams,
        "seed",
        _SAMPLES,
        "of the noise, 0 to 2**64 - 1; the same seed and prompt give the same answer",
        metavar="S",
        type=int,
        default_text="drawn where tokens are sampled, and written",
    )
    n: int = _field(SamplingParams, "n", _SAMPLES)
    stop: tuple[str, ...] = _field(
        SamplingParams,
        "stop",
        _SAMPLES,
        "end a completion before this text; may be given several times. The tokens that complete "
        "it stay in token_ids and in the digest",
        metavar="TEXT",
    )
    best_of: int = _field(
        SamplingParams,
        "best_of",
        _SAMPLES,
        "make so many completions of a prompt, and write the --n with the greatest sum of "
        "logprobs, best first",
        default_text="as many as --n",
    )
    stop_token_id: tuple[int, ...] = _field(
        SamplingParams,
        "stop_token_ids",
        _SAMPLES,
        "token that ends a completion, beside the model's own; may be given several times",
        metavar="ID",
        type=int,
    )
    include_stop: bool = _field(
        SamplingParams, "include_stop_str_in_output", _SAMPLES, "end the text behind --stop"
    )
    skip_special_tokens: bool = _field(
        SamplingParams, "skip_special_tokens", _SAMPLES, "leave special tokens out of the text"
    )
    truncate_prompt_tokens: int | None = _field(
        SamplingParams, "truncate_prompt_tokens", _SAMPLES, type=int
    )
    ignore_eos: bool = _field(SamplingParams, "ignore_eos", _SAMPLES)
    min_tokens: int = _field(SamplingParams, "min_tokens", _SAMPLES)
    repetition_penalty: float = _field(SamplingParams, "repetition_penalty", _SAMPLES, metavar="R")
    presence_penalty: float = _field(SamplingParams, "presence_penalty", _SAMPLES, metavar="P")
    frequency_penalty: float = _field(SamplingParams, "frequency_penalty", _SAMPLES, metavar="P")
    logit_bias: tuple[str, ...] = _field(
        SamplingParams,
        "logit_bias",
        _SAMPLES,
        "add a number to the logit of a token; may be given several times",
        metavar="ID=BIAS",
    )
    allowed_token_id: tuple[int, ...] = _field(
        SamplingParams,
        "allowed_token_ids",
        _SAMPLES,
        "allow this token and others that are given so, and no more",
        metavar="ID",
        type=int,
    )
    bad_word: tuple[str, ...] = _field(
        SamplingParams,
        "bad_words",
        _SAMPLES,
        "never write this text, as it is cut into tokens alone and after a space; may be given "
        "several times",
        metavar="TEXT",
    )
    logprobs_mode: str = _field(SamplingParams, "logprobs_mode", _SAMPLES, choices=LOGPROBS_MODES)
    noise: str = _field(
        SamplingParams,
        "noise",
        _SAMPLES,
        "draw noise of its own for each prompt, or the same for all prompts of one length",
        choices=NOISES,
    )
    json_schema: str | None = _option(
        None, _SAMPLES, "let completions be JSON of this schema; @FILE reads it", metavar="JSON"
    )
    json_object: bool = _option(False, _SAMPLES, "let completions be a JSON object")
    regex: str | None = _option(
        None, _SAMPLES, "let completions match this regular expression", metavar="REGEX"
    )
    choice: tuple[str, ...] = _option(
        (),
        _SAMPLES,
        "let completions be one of the texts that are given so",
        metavar="TEXT",
    )
    grammar: str | None = _option(
        None,
        _SAMPLES,
        "let completions be of this grammar, in llguidance's variant of Lark; @FILE reads it",
        metavar="LARK",
    )
    generation_config: str = _option(
        "auto",
        _SAMPLES,
        "auto: sampling that is not given is that of the model's generation_config.json, if it has "
        "one. none: it is that of the defaults here",
        choices=("auto", "none"),
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
    batch_size: int | None = _field(
        EngineConfig,
        "batch_size",
        _SCHEDULE,
        default=None,
        default_text="as many as there are completions, up to 8 a replica on a CPU, 512 on a GPU, "
        "256 where its memory is small",
        type=int,
    )
    prefill_chunk: int | None = _field(
        EngineConfig,
        "prefill_chunk",
        _SCHEDULE,
        default=None,
        default_text="64 on a CPU, 512 on a GPU; no more than the longest prompt needs",
        type=int,
    )
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
        default_text="enough for --batch-size completions of full length, or as many as fit",
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
        default_cache_dir(),
        _SCHEDULE,
        f"where compiled programs are kept, so that the next start is quick; {NO_CACHE} keeps none",
        metavar="DIR",
    )
    warm: bool = _option(
        False,
        _SCHEDULE,
        "compile the programs that such prompts can need, keep them in --cache-dir, and end",
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
        "logprobs",
        _OUTPUT,
        "with json and jsonl: also the K most likely tokens at each position, at most 64",
        metavar="K",
    )
    receipts: str | None = _option(
        None,
        _OUTPUT,
        "write a receipt of each completion, a line each: what made it, as python -m detjax.replay "
        "and detjax.audit check it",
        metavar="FILE",
    )
    sign: str | None = _option(
        None,
        _OUTPUT,
        "sign the receipts with this ed25519 key, a PEM file",
        metavar="KEY",
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
    given: frozenset[str] = frozenset()  # no option: the names of those that were given
    check: bool = _option(
        False,
        _CHECK,
        f"compare the runs bit by bit; exit with {BITS_DIFFER} and the first differences",
    )


def with_defaults(args: GenerateArgs, defaults: Mapping[str, Any]) -> GenerateArgs:
    """Return the options, with a model's defaults where none was given.

    Args:
        args: The options.
        defaults: Fields of `SamplingParams`.

    Raises:
        InputError: If a default is out of range.
    """
    changed = {
        its.name: defaults[its.metadata["sets"][1]]
        for its in dataclasses.fields(args)
        if its.name not in args.given
        and its.metadata.get("sets", (None,))[0] is SamplingParams
        and its.metadata["sets"][1] in defaults
    }
    args = dataclasses.replace(args, **changed)
    with bad_input("generation_config.json of the model: "):
        sampling_params(args)
    return args


def _values(args: GenerateArgs, of: type) -> dict[str, Any]:
    """The options that set fields of `of`, under the names of these."""
    settings = ((its.name, its.metadata.get("sets")) for its in dataclasses.fields(args))
    return {sets[1]: getattr(args, name) for name, sets in settings if sets and sets[0] is of}


_FLAGS = {
    "stop_token_ids": "stop-token-id",
    "allowed_token_ids": "allowed-token-id",
    "bad_words": "bad-word",
}
"""Options whose names are not those of the fields that they set."""


def sampling_params(args: GenerateArgs) -> SamplingParams:
    """Return the sampling options.

    Raises:
        InputError: If one is out of range.
    """
    values = _values(args, SamplingParams)
    values["logit_bias"] = tuple(map(_bias, args.logit_bias))
    values["structured_output"] = _form(args)
    try:
        return SamplingParams(**values)
    except ValueError as error:
        name, _, rest = str(error).partition("=")
        field = name.partition("[")[0]
        raise InputError(f"--{_FLAGS.get(field, field).replace('_', '-')} {rest}") from error


def _form(args: GenerateArgs) -> StructuredOutput | None:
    """The form of output, if one is asked for."""
    specs = {kind: getattr(args, kind) for kind in FORMS}
    given = {kind: spec for kind, spec in specs.items() if spec not in (None, False, ())}
    if len(given) > 1:
        flags = " and ".join("--" + kind.replace("_", "-") for kind in given)
        raise InputError(f"{flags} do not go together; give one")
    for kind, spec in given.items():
        flag = "--" + kind.replace("_", "-")
        if kind in ("json_schema", "grammar") and spec.startswith("@"):
            try:
                spec = Path(spec[1:]).expanduser().read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise InputError(f"{flag} {spec} cannot be read: {error}") from error
        with bad_input(f"{flag}: "):
            if kind == "choice":
                return StructuredOutput.of_choices(spec)
            return StructuredOutput(kind=kind, spec="" if kind == "json_object" else spec)
    return None


def _bias(given: str) -> tuple[int, float]:
    token_id, _, bias = given.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError as error:
        raise InputError(f"--logit-bias {given}: give ID=BIAS, as in 17=-2.5") from error


def engine_options(args: GenerateArgs, *, max_len: int) -> dict[str, Any]:
    """Return the fields of `EngineConfig` that are not left to `choose_sizes`.

    Raises:
        InputError: If one is out of range or does not go with another, or with prompts and
            completions of `max_len` tokens together.
    """
    values = _values(args, EngineConfig)
    asked = {name: value for name, value in values.items() if value is not None}
    with bad_input():
        EngineConfig(**asked, max_len=max_len)
    return asked
