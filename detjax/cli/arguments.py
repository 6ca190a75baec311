# SPDX-License-Identifier: Apache-2.0
"""The options of `python -m detjax.generate`: one field each."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from detjax.cli import options
from detjax.cli.errors import BITS_DIFFER, InputError, bad_input
from detjax.cli.options import DTYPES, Option, in_flags, of_field
from detjax.engine.config import OWN_DRAFT_WEIGHTS, EngineConfig
from detjax.engine.requests.sampling_params import LOGPROBS_MODES, NOISES, SamplingParams
from detjax.engine.sampling.structured_output import FORMS, StructuredOutput

GROUPS = {
    "model": "Weights, chat template and adapters.",
    "prompts": "Texts to continue. Prompts of --prompt come first, then those of the file.",
    "sampling": "How each next token is chosen. A line of --prompts-file can have its own values.",
    "numerics": "These options change the bits. Two runs have the same bits if these options, the "
    "build\nand the hardware are the same. The printed fingerprint is a hash of all of them.",
    "batch, mesh and schedule": "These options change speed and memory. They change no bit, except "
    "--mode fast,\nwhich makes no claim.",
    "output": "Where and how completions are written.",
    "check": "Check on this machine that the bits are the same.",
}
_MODEL, _PROMPTS, _SAMPLES, _NUMERICS, _SCHEDULE, _OUTPUT, _CHECK = GROUPS


def _as(option: Option, group: str) -> Any:
    """The field of an option's value, in a group of `--help`."""
    return field(default=option.default, metadata={"option": option, "group": group})


def _sampling(name: str) -> Option:
    return of_field(SamplingParams, name)


def _engine(name: str) -> Option:
    return of_field(EngineConfig, name)


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateArgs:
    """Every option of the command; `--help` and its defaults are made from these fields."""

    model: str = _as(options.MODEL, _MODEL)
    revision: str | None = _as(options.REVISION, _MODEL)
    chat_template: str | None = _as(options.CHAT_TEMPLATE, _MODEL)
    enable_lora: bool = _as(options.ENABLE_LORA, _MODEL)
    lora_modules: tuple[str, ...] = _as(
        replace(
            options.LORA_MODULES,
            help=f"{options.LORA_MODULES.help}. If there is one, it answers all prompts. If there "
            "are several, the field `lora` of a line of --prompts-file names one",
        ),
        _MODEL,
    )
    prompt: tuple[str, ...] = _as(options.PROMPT, _PROMPTS)
    prompts_file: str | None = _as(options.PROMPTS_FILE, _PROMPTS)
    chat: bool = _as(
        Option(
            name="chat",
            default=False,
            help="apply the model's chat template to each plain prompt, as a user's message",
        ),
        _PROMPTS,
    )
    system_prompt: str | None = _as(
        Option(
            name="system_prompt",
            metavar="TEXT",
            help="system message of each conversation that has none. It implies --chat",
        ),
        _PROMPTS,
    )
    control_tokens: bool = _as(
        Option(
            name="control_tokens",
            default=False,
            help="read special tokens such as <|im_end|> in the text of a prompt as tokens. "
            "Without it they are plain text, and only the chat template begins and ends turns",
        ),
        _PROMPTS,
    )
    max_tokens: int = _as(options.MAX_TOKENS, _SAMPLES)
    temperature: float = _as(options.TEMPERATURE, _SAMPLES)
    top_k: int = _as(options.TOP_K, _SAMPLES)
    top_p: float = _as(options.TOP_P, _SAMPLES)
    min_p: float = _as(options.MIN_P, _SAMPLES)
    seed: int | None = _as(options.SEED, _SAMPLES)
    n: int = _as(replace(_sampling("n"), help="sequences per prompt, at most 1024"), _SAMPLES)
    stop: tuple[str, ...] = _as(
        replace(
            _sampling("stop"),
            metavar="TEXT",
            help="end a completion before this text; may be given several times. The tokens of the "
            "text stay in token_ids and in the digest",
        ),
        _SAMPLES,
    )
    best_of: int = _as(
        replace(
            _sampling("best_of"),
            default_text="0: as many as --n",
            help="generate N completions per prompt, and write the --n with the greatest sum of "
            "logprobs, best first",
        ),
        _SAMPLES,
    )
    stop_token_ids: tuple[int, ...] = _as(
        replace(
            _sampling("stop_token_ids"),
            flags=("--stop-token-id", "--stop-token-ids"),
            metavar="ID",
            parse=int,
            help="a further token that ends a completion; may be given several times",
        ),
        _SAMPLES,
    )
    include_stop_str_in_output: bool = _as(
        replace(
            _sampling("include_stop_str_in_output"),
            flags=("--include-stop", "--include-stop-str-in-output"),
            help="include the text of --stop at the end of the completion's text",
        ),
        _SAMPLES,
    )
    skip_special_tokens: bool = _as(
        replace(_sampling("skip_special_tokens"), help="leave special tokens out of the text"),
        _SAMPLES,
    )
    truncate_prompt_tokens: int | None = _as(
        replace(
            _sampling("truncate_prompt_tokens"),
            parse=int,
            default_text="all; a prompt that is too long is an error",
            help="keep only the last N tokens of a prompt; -1 keeps as many as leave room for "
            "--max-tokens in the context, and at least one",
        ),
        _SAMPLES,
    )
    ignore_eos: bool = _as(
        replace(_sampling("ignore_eos"), help="go on after the model's own end tokens"), _SAMPLES
    )
    min_tokens: int = _as(
        replace(
            _sampling("min_tokens"),
            help="generate at least N tokens: before that no end token is possible, and --stop is "
            "ignored",
        ),
        _SAMPLES,
    )
    repetition_penalty: float = _as(
        replace(
            _sampling("repetition_penalty"),
            metavar="R",
            help="for tokens of the prompt or the completion: positive logits are divided by R, "
            "others multiplied; from 0.01 to 100, and 1 changes nothing",
        ),
        _SAMPLES,
    )
    presence_penalty: float = _as(
        replace(
            _sampling("presence_penalty"),
            metavar="P",
            help="subtracted from the logit of each token that the completion has; from -2 to 2",
        ),
        _SAMPLES,
    )
    frequency_penalty: float = _as(
        replace(
            _sampling("frequency_penalty"),
            metavar="P",
            help="subtracted from the logit of a token once per occurrence in the completion; from "
            "-2 to 2",
        ),
        _SAMPLES,
    )
    logit_bias: tuple[str, ...] = _as(
        replace(
            _sampling("logit_bias"),
            metavar="ID=BIAS",
            help="add BIAS to the logit of token ID; may be given several times",
        ),
        _SAMPLES,
    )
    allowed_token_ids: tuple[int, ...] = _as(
        replace(
            _sampling("allowed_token_ids"),
            flags=("--allowed-token-id", "--allowed-token-ids"),
            metavar="ID",
            parse=int,
            default_text="all",
            help="allow only this token and those of further --allowed-token-id",
        ),
        _SAMPLES,
    )
    bad_words: tuple[str, ...] = _as(
        replace(
            _sampling("bad_words"),
            flags=("--bad-word", "--bad-words"),
            metavar="TEXT",
            help="never generate this text, as tokenized alone and after a space; may be given "
            "several times",
        ),
        _SAMPLES,
    )
    logprobs_mode: str = _as(
        replace(
            _sampling("logprobs_mode"),
            choices=LOGPROBS_MODES,
            help="raw: log-probabilities of the model's logits at temperature 1. processed: of the "
            "logits that are sampled from, after biases, penalties, masks, temperature and "
            "filters; at --temperature 0, at temperature 1 without filters",
        ),
        _SAMPLES,
    )
    noise: str = _as(
        replace(
            _sampling("noise"),
            choices=NOISES,
            help="per_prompt: each prompt has its own sampling noise. common: all prompts of one "
            "length have the same",
        ),
        _SAMPLES,
    )
    json_schema: str | None = _as(
        Option(
            name="json_schema",
            metavar="JSON",
            help="generate JSON that matches this schema; @FILE reads the schema from a file",
        ),
        _SAMPLES,
    )
    json_object: bool = _as(
        Option(name="json_object", default=False, help="generate a JSON object"),
        _SAMPLES,
    )
    regex: str | None = _as(
        Option(
            name="regex",
            metavar="REGEX",
            help="generate text that matches this regular expression",
        ),
        _SAMPLES,
    )
    choice: tuple[str, ...] = _as(
        Option(
            name="choice",
            default=(),
            metavar="TEXT",
            help="generate one of the texts of --choice; given once per text",
        ),
        _SAMPLES,
    )
    grammar: str | None = _as(
        Option(
            name="grammar",
            metavar="LARK",
            help="generate text of this grammar, in llguidance's variant of Lark; @FILE reads the "
            "grammar from a file",
        ),
        _SAMPLES,
    )
    generation_config: str = _as(options.GENERATION_CONFIG, _SAMPLES)
    dtype: str = _as(options.DTYPE, _NUMERICS)
    cast_weights: str = _as(options.CAST_WEIGHTS, _NUMERICS)
    quantized_weights: str = _as(options.QUANTIZED_WEIGHTS, _NUMERICS)
    compute: str = _as(
        Option(
            name="compute",
            default="bfloat16",
            choices=DTYPES,
            default_text="that of --dtype",
            help="dtype of activations and cache, if it differs from that of the weights "
            "(--dtype). Products and sums are float32 in either case. It changes the bits",
        ),
        _NUMERICS,
    )
    kv_cache_dtype: str = _as(options.KV_CACHE_DTYPE, _NUMERICS)
    backend: str = _as(options.BACKEND, _NUMERICS)
    tp: int = _as(options.TP, _SCHEDULE)
    dp: int = _as(options.DP, _SCHEDULE)
    coordinator: str | None = _as(options.COORDINATOR, _SCHEDULE)
    num_processes: int | None = _as(options.NUM_PROCESSES, _SCHEDULE)
    process_id: int | None = _as(options.PROCESS_ID, _SCHEDULE)
    max_len: int | None = _as(options.MAX_LEN, _SCHEDULE)
    batch_size: int | None = _as(options.BATCH_SIZE, _SCHEDULE)
    prefill_chunk: int | None = _as(options.PREFILL_CHUNK, _SCHEDULE)
    mode: str = _as(options.MODE, _SCHEDULE)
    speculative_config: str | None = _as(options.SPECULATIVE_CONFIG, _SCHEDULE)
    draft_weights: str = _as(
        replace(
            _engine("draft_weights"),
            choices=OWN_DRAFT_WEIGHTS,
            help="weights that compute the drafts of --mode dvr: the model's own, or an 8-bit "
            "copy, which needs half of their memory in addition",
        ),
        _SCHEDULE,
    )
    decode_steps: int | None = _as(options.DECODE_STEPS, _SCHEDULE)
    has_prompt_lookup: bool = _as(
        replace(
            _engine("has_prompt_lookup"),
            flags=("--prompt-lookup",),
            help="with --mode invariant: draft tokens from earlier occurrences in the text (n-gram "
            "lookup), or from a request's prediction, and verify many per step",
        ),
        _SCHEDULE,
    )
    verify_window: int = _as(
        replace(
            _engine("verify_window"),
            help="tokens of a verification window: the last committed token and N - 1 drafts",
        ),
        _SCHEDULE,
    )
    verify_rows: int = _as(
        replace(
            _engine("verify_rows"),
            help="most windows in one verification step of a replica; at most its batch size",
        ),
        _SCHEDULE,
    )
    max_loras: int = _as(options.MAX_LORAS, _SCHEDULE)
    max_lora_rank: int = _as(options.MAX_LORA_RANK, _SCHEDULE)
    max_expert_lora_rank: int = _as(options.MAX_EXPERT_LORA_RANK, _SCHEDULE)
    num_pages: int = _as(options.NUM_PAGES, _SCHEDULE)
    gpu_memory_utilization: float | None = _as(options.GPU_MEMORY_UTILIZATION, _SCHEDULE)
    cache_dir: str = _as(options.CACHE_DIR, _SCHEDULE)
    warm: bool = _as(options.WARM, _SCHEDULE)
    format: str = _as(
        replace(
            options.FORMAT,
            choices=("text", "json", "jsonl"),
            help="text: streamed as it is generated. json: one document at the end. jsonl: one "
            "line per completion, in order, as soon as it is complete",
        ),
        _OUTPUT,
    )
    output: str | None = _as(options.OUTPUT, _OUTPUT)
    logprobs: int = _as(
        replace(
            _sampling("logprobs"),
            metavar="K",
            help="also write the K most likely tokens at each position, at most 64; needs --format "
            "json or jsonl",
        ),
        _OUTPUT,
    )
    receipts: str | None = _as(
        Option(
            name="receipts",
            metavar="FILE",
            help="write a receipt of each completion, one per line; python -m detjax.replay and "
            "python -m detjax.audit check them",
        ),
        _OUTPUT,
    )
    sign: str | None = _as(options.SIGN, _OUTPUT)
    quiet: bool = _as(options.QUIET, _OUTPUT)
    stats: bool = _as(
        Option(
            name="stats",
            default=False,
            help="show the engine's counters at the end: steps, cache, drafts, latencies",
        ),
        _OUTPUT,
    )
    trace: str | None = _as(
        Option(
            name="trace",
            metavar="FILE",
            help="write a timeline of the first run, which https://ui.perfetto.dev opens",
        ),
        _OUTPUT,
    )
    check: bool = _as(
        Option(
            name="check",
            default=False,
            help=f"compare the runs bit by bit; exit with {BITS_DIFFER} and the first differences",
        ),
        _CHECK,
    )
    repeat: int = _as(
        Option(
            name="repeat",
            default=1,
            parse=int,
            help="with --check: run N times, with other batch sizes, orders, prefill chunks and "
            "neighbours in the batch. With --mode dvr or a draft model every second run is "
            "--mode invariant without drafts. Completions of the first run are written",
        ),
        _CHECK,
    )
    self_check: str = _as(options.SELF_CHECK, _CHECK)
    expect_digest: str | None = _as(
        Option(
            name="expect_digest",
            metavar="HEX",
            help=f"exit with {BITS_DIFFER} if the digest of all completions differs from this "
            "digest, which an earlier run has printed",
        ),
        _CHECK,
    )
    check_process: bool = _as(
        Option(
            name="check_process",
            default=False,
            help="also run once in a new process that compiles everything again, and compare",
        ),
        _CHECK,
    )
    given: frozenset[str] = frozenset()  # no option: the names of those that were given


OPTIONS: Mapping[str, Option] = {
    its.name: its.metadata["option"] for its in dataclasses.fields(GenerateArgs) if its.metadata
}
"""By the name of their fields."""

as_flags = partial(in_flags, options=tuple(OPTIONS.values()))
"""A message about fields as one about options of the command."""


def with_defaults(args: GenerateArgs, defaults: Mapping[str, Any]) -> GenerateArgs:
    """Return the options, with a model's defaults where none was given.

    Args:
        args: The options.
        defaults: Fields of `SamplingParams`.

    Raises:
        InputError: If a default is out of range.
    """
    changed = {
        name: defaults[name]
        for name, option in OPTIONS.items()
        if name not in args.given and option.sets is SamplingParams and name in defaults
    }
    args = replace(args, **changed)
    with bad_input("generation_config.json of the model: "):
        sampling_params(args)
    return args


def _values(args: GenerateArgs, of: type) -> dict[str, Any]:
    """The options that set fields of `of`."""
    return {name: getattr(args, name) for name, option in OPTIONS.items() if option.sets is of}


def sampling_params(args: GenerateArgs) -> SamplingParams:
    """Return the sampling options.

    Raises:
        InputError: If one is out of range.
    """
    values = _values(args, SamplingParams)
    values["logit_bias"] = tuple(map(_bias, args.logit_bias))
    values["structured_output"] = _form(args)
    with bad_input(rephrase=as_flags):
        return SamplingParams(**values)


def _form(args: GenerateArgs) -> StructuredOutput | None:
    """The form of output, if one is asked for."""
    specs = {kind: getattr(args, kind) for kind in FORMS}
    given = {kind: spec for kind, spec in specs.items() if spec not in (None, False, ())}
    if len(given) > 1:
        flags = " and ".join(OPTIONS[kind].flag for kind in given)
        raise InputError(f"{flags} do not go together; give one")
    for kind, spec in given.items():
        flag = OPTIONS[kind].flag
        if kind in ("json_schema", "grammar") and spec.startswith("@"):
            try:
                spec = Path(spec[1:]).expanduser().read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise InputError(f"{flag} {spec} cannot be read: {error}") from error
        with bad_input(rephrase=partial(about_form, kind)):
            if kind == "choice":
                return StructuredOutput.of_choices(spec)
            return StructuredOutput(kind=kind, spec="" if kind == "json_object" else spec)
    return None


def about_form(kind: str, message: str) -> str:
    """A message about a form of output as one about the option that asks for it."""
    return message.replace(f"structured_output={kind}", OPTIONS[kind].flag)


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
    speculative = options.read_speculative_config(args.speculative_config)
    of_drafts = {} if speculative is None else speculative.engine_options()
    asked = {name: value for name, value in values.items() if value is not None}
    asked |= {name: value for name, value in of_drafts.items() if name not in args.given}
    with bad_input(rephrase=as_flags):
        EngineConfig(**{"max_len": max_len, **asked})
    return asked
