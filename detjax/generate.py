# SPDX-License-Identifier: Apache-2.0
"""`python -m detjax.generate`: continue prompts, and prove that the answer is always the same.

What chooses bits and what does not stand apart in `--help`. JAX is imported only once the command
line and the prompts are known to be good.
"""

import abc
import argparse
import codecs
import contextlib
import dataclasses
import difflib
import hashlib
import io
import itertools
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol, runtime_checkable

import numpy as np

from detjax.models.config import ModelConfig
from detjax.models.tokenizer import Tokenizer
from detjax.serving.request import Completion, FinishReason, Request, SamplingParams, TokenEvent
from detjax.serving.text import TextStream

_IMPORTED_S = time.perf_counter()

OK, INTERNAL_ERROR, BAD_INPUT, BITS_DIFFER = 0, 1, 2, 3
INTERRUPTED, READER_GONE = 130, 141

BUNDLED = "bundled"
STANDARD_INPUT = "-"
NO_CACHE = "none"


class InputError(Exception):
    """Something the user gave cannot be done. The message names it and the fix."""


# ---------------------------------------------------------------------------------- command line

DESCRIPTION = """\
Continue prompts with a Llama, Mistral or Qwen model. The token ids and the float32 logprobs of a
completion are the same bits in any batch, mesh and schedule; its digest is a hash of them.

Text goes to standard output, everything else to standard error."""

GROUPS = {
    "model": "Which weights. The default is a small model that comes with the package.",
    "prompts": "What to continue. Prompts of --prompt come first, then those of the file.",
    "sampling": "How each next token is chosen. The same for every prompt.",
    "numerics": "These choose the bits: runs agree if these agree, the build and the hardware.\n"
    "The fingerprint that is printed stands for all of them.",
    "batch, mesh and schedule": "These choose speed and memory. They change no bit.",
    "output": "How completions are written.",
    "check": "See for yourself that the claim holds here.",
}

EPILOG = f"""\
examples:
  python -m detjax.generate --prompt "It was a dark night"
  python -m detjax.generate --prompt "17+26=" --max-tokens 4 --logprobs 3 --format jsonl
  python -m detjax.generate --model Qwen/Qwen3-0.6B --chat --prompt "Why is the sky blue?"
  echo "Once upon a time" | python -m detjax.generate --prompt - --temperature 0.8 --n 4
  python -m detjax.generate --prompts-file prompts.jsonl --batch-size 16 --tp 4 --format jsonl
  python -m detjax.generate --prompt "It was a dark night" --repeat 4 --check

JSON: per completion `index` (of the prompt), `sample`, `prompt_token_ids`, `token_ids` (with the
one that ended it), `text`, `finish_reason` (stop or length), `logprobs`, `top_logprobs` (with
--logprobs: [token id, logprob] pairs), `digest` (sha256 of the token ids as int32 and the logprobs
as float32, little-endian) and `fingerprint`. A logprob is the float32 written as the shortest
decimal of its exact value as a float64: read it back, round to float32, and no bit is lost.

exit codes: {OK} success; {BAD_INPUT} bad input, with one line that says which and how to fix it;
{BITS_DIFFER} --check found a bit that differs; {INTERNAL_ERROR} an error of detjax; {INTERRUPTED} \
interrupted; {READER_GONE} the
reader of standard output went away."""


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
) -> Any:
    """Describe one option: the field of its value, and its entry in `--help`."""
    if default_text or isinstance(default, int | float | str) and not isinstance(default, bool):
        text = f"{text} (default: {default_text or default})"
    shown = {"choices": tuple(choices)} if choices else {"metavar": metavar}
    return field(default=default, metadata={"group": group, "help": text, "shown": shown})


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
        "different samples a prompt; they need a temperature above 0 to differ",
    )
    stop: tuple[str, ...] = _option(
        (),
        _SAMPLES,
        "end a completion before this text; may be given several times. The tokens that complete "
        "it stay in token_ids and in the digest",
        metavar="TEXT",
    )
    dtype: str = _option("bfloat16", _NUMERICS, "what weights are stored in", choices=_DTYPES)
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
    batch_size: int = _option(
        8,
        _SCHEDULE,
        "completions that are made at once; a multiple of --dp",
    )
    prefill_chunk: int = _option(64, _SCHEDULE, "prompt tokens that are read at once")
    mode: str = _option(
        "invariant",
        _SCHEDULE,
        "invariant: every step uses canonical kernels. dvr and fast are refused for now",
        choices=("invariant", "dvr", "fast"),
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
    repeat: int = _option(
        1,
        _CHECK,
        "with --check: run N times, at other batch sizes, orders and chunks, among other "
        "neighbours; completions of the first run are written",
    )
    check: bool = _option(
        False,
        _CHECK,
        f"compare the runs bit by bit; exit with {BITS_DIFFER} and the first differences",
    )


class _Parser(argparse.ArgumentParser):
    """Reports a mistake as every other one is reported."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage.

        Raises:
            InputError: Always.
        """
        known = [name for action in self._actions for name in action.option_strings]
        _, _, rest = message.partition("unrecognized arguments: ")
        near = difflib.get_close_matches(rest.split("=")[0].split(" ")[0], known, n=1)
        hint = f"; did you mean {near[0]}?" if rest and near else "; see --help"
        raise InputError(message.removeprefix("argument ") + hint)


def make_parser() -> argparse.ArgumentParser:
    """Make the parser from the fields of `GenerateArgs`. It sets only what was given."""
    parser = _Parser(
        prog="python -m detjax.generate",
        usage="%(prog)s --prompt TEXT [options]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    groups = {name: parser.add_argument_group(name, text) for name, text in GROUPS.items()}
    for option in dataclasses.fields(GenerateArgs):
        described, default = option.metadata, option.default
        if isinstance(default, bool):
            kind: dict[str, Any] = {"action": "store_true"}
        elif isinstance(default, tuple):
            kind = {"action": "append", **described["shown"]}
        else:
            parse = str if default is None else type(default)
            kind = {"type": parse, **described["shown"]}
        name = "--" + option.name.replace("_", "-")
        groups[described["group"]].add_argument(name, help=described["help"], **kind)
    return parser


def parse_args(argv: Sequence[str] | None) -> GenerateArgs:
    """Read the command line and check what needs no model.

    Raises:
        InputError: If a value is out of range or two options do not go together.
    """
    values = vars(make_parser().parse_args(argv))
    values.setdefault("compute", values.get("dtype", "bfloat16"))
    for name in ("prompt", "stop"):
        values[name] = tuple(values.get(name, ()))
    args = GenerateArgs(**values)
    if args.mode != "invariant":
        raise InputError(f"--mode {args.mode} is not available yet; use --mode invariant")
    for name in ("tp", "dp", "batch_size", "prefill_chunk", "repeat"):
        if getattr(args, name) < 1:
            flag = "--" + name.replace("_", "-")
            raise InputError(f"{flag} {getattr(args, name)} must be at least 1")
    if args.batch_size % args.dp:
        raise InputError(
            f"--batch-size {args.batch_size} must be a multiple of --dp {args.dp}, so that each "
            "replica has as many rows"
        )
    if args.revision is not None and args.model == BUNDLED:
        raise InputError(f"--revision {args.revision} needs a Hugging Face id as --model")
    if args.check and args.repeat < 2:
        raise InputError("--check compares runs: give it --repeat N with N of at least 2")
    if args.repeat > 1 and not args.check:
        raise InputError(f"--repeat {args.repeat} only means something with --check; add it")
    if args.logprobs and args.format == "text":
        raise InputError("--logprobs has no place in text; add --format jsonl or --format json")
    for stop in args.stop:
        if not stop:
            raise InputError("--stop is empty; it would end every completion before it begins")
        _check_unicode(stop, "--stop")
    sampling_params(args)
    return args


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


_SAMPLING_NAMES = {f.name for f in dataclasses.fields(SamplingParams)} | {"stop", "logprobs"}


def _check_unicode(text: str, where: str) -> None:
    """Refuse half characters: a command line that was not UTF-8, or a lone JSON surrogate.

    Raises:
        InputError: If there is one.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where} is not valid UTF-8 at character {error.start + 1}") from error


# --------------------------------------------------------------------------------------- prompts


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """What to continue: a text, or a conversation where there are messages.

    `origin` says where it was given, for messages about it.
    """

    origin: str
    text: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()


def read_prompts(args: GenerateArgs) -> tuple[Prompt, ...]:
    """Read every prompt, those of `--prompt` first.

    Raises:
        InputError: If there is none, one is empty, or a file or line cannot be read.
    """
    if args.prompt.count(STANDARD_INPUT) > 1:
        raise InputError("--prompt - was given twice; standard input can be read once")
    prompts = []
    for i, text in enumerate(args.prompt):
        origin = "--prompt" if len(args.prompt) == 1 else f"--prompt number {i + 1}"
        if text == STANDARD_INPUT:
            origin, text = "standard input", _read_standard_input()
        _check_unicode(text, origin)
        prompts.append(Prompt(origin=origin, text=text))
    if args.prompts_file is not None:
        prompts.extend(_read_prompts_file(Path(args.prompts_file).expanduser()))
    if not prompts:
        raise InputError("there is no prompt; give --prompt TEXT, --prompt - or --prompts-file F")
    for prompt in prompts:
        if not prompt.text and not prompt.messages:
            raise InputError(f"{prompt.origin} is empty; give at least one character")
    return tuple(_as_chat(prompt) for prompt in prompts) if args.chat else tuple(prompts)


def _as_chat(prompt: Prompt) -> Prompt:
    if prompt.messages:
        return prompt
    user = {"role": "user", "content": prompt.text}
    return Prompt(origin=prompt.origin, messages=(user,))


def _read_standard_input() -> str:
    if sys.stdin.isatty():
        print("reading the prompt from the keyboard; end it with Ctrl-D", file=sys.stderr)
    text = _decode(sys.stdin.buffer.read(), "standard input")
    return text.removesuffix("\n").removesuffix("\r")


def _read_prompts_file(path: Path) -> Iterator[Prompt]:
    """Yield the prompts of a file, line by line."""
    readers = {".txt": _read_text_line, ".jsonl": _read_json_line}
    if path.suffix not in readers:
        raise InputError(f"--prompts-file {path} must end in .txt or .jsonl")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"--prompts-file {path} cannot be read: {error.strerror}") from error
    lines = content.removeprefix(codecs.BOM_UTF8).split(b"\n")
    found = False
    for number, line in enumerate(lines, start=1):
        origin = f"{path} line {number}"
        if line.strip():
            found = True
            yield readers[path.suffix](_decode(line.removesuffix(b"\r"), origin), origin)
    if not found:
        raise InputError(f"--prompts-file {path} has no prompt in it; give a line at least")


def _read_text_line(line: str, origin: str) -> Prompt:
    return Prompt(origin=origin, text=line)


def _read_json_line(line: str, origin: str) -> Prompt:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise InputError(f"{origin} is not JSON: {error}") from error
    if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
        raise InputError(f"{origin} must be an object with either `prompt` or `messages`")
    sampling = sorted(entry.keys() & _SAMPLING_NAMES)
    if sampling:
        raise InputError(
            f"{origin} has `{sampling[0]}`, but sampling is the same for every prompt; take it out "
            "and give the option on the command line"
        )
    _check_unicode(to_json(entry), origin)
    if "prompt" in entry:
        if not isinstance(entry["prompt"], str):
            raise InputError(f"{origin}: `prompt` must be text, not {entry['prompt']!r:.40}")
        return Prompt(origin=origin, text=entry["prompt"])
    messages = entry["messages"]
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise InputError(f"{origin}: `messages` must be a list of objects with role and content")
    if not messages:
        raise InputError(f"{origin}: `messages` is empty; give at least one")
    return Prompt(origin=origin, messages=tuple(messages))


def _decode(content: bytes, origin: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{origin} is not valid UTF-8 at byte {error.start + 1} "
            f"(0x{content[error.start]:02x}); convert it to UTF-8"
        ) from error


# ------------------------------------------------------------------------------------------- job


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What to compute, apart from how: the requests, and what ends a completion.

    Attributes:
        requests: One for each prompt, in order.
        stop_strings: Texts that end a completion.
        end_ids: Tokens that end one.
        max_len: Longest prompt and completion together that may come up.
    """

    requests: tuple[Request, ...]
    stop_strings: tuple[str, ...]
    end_ids: frozenset[int]
    max_len: int

    @property
    def samples(self) -> tuple[tuple[int, int], ...]:
        """(prompt, sample) of every completion, in the order in which they are written."""
        return tuple((i, s) for i, r in enumerate(self.requests) for s in range(r.sampling.n))


def make_job(
    args: GenerateArgs, prompts: Sequence[Prompt], tokenizer: Tokenizer, config: ModelConfig
) -> Job:
    """Turn prompts into requests that fit the model.

    Raises:
        InputError: If a prompt has no tokens, too many, or some that the model does not know.
    """
    end_ids = frozenset(config.eos_token_ids)
    if tokenizer.eos_id is not None:
        end_ids |= {tokenizer.eos_id}
    sampling = dataclasses.replace(sampling_params(args), stop_token_ids=tuple(sorted(end_ids)))
    context = config.max_position_embeddings
    requests = []
    for prompt in prompts:
        with bad_input(f"{prompt.origin}: "):
            ids = _encode(prompt, tokenizer)
        _check_ids(ids, prompt.origin, config)
        room = min(sampling.max_tokens, context - len(ids))
        requests.append(
            Request(
                prompt_token_ids=tuple(ids),
                sampling=dataclasses.replace(sampling, max_tokens=room),
            )
        )
    longest = max(len(r.prompt_token_ids) + r.sampling.max_tokens for r in requests)
    return Job(
        requests=tuple(requests),
        stop_strings=args.stop,
        end_ids=end_ids,
        max_len=_rounded_len(longest, context),
    )


def _encode(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    if prompt.messages:
        return tokenizer.apply_chat_template(prompt.messages)
    return tokenizer.encode(prompt.text)


def _check_ids(ids: Sequence[int], origin: str, config: ModelConfig) -> None:
    context = config.max_position_embeddings
    if not ids:
        raise InputError(f"{origin} has no tokens; give some text")
    if len(ids) >= context:
        raise InputError(
            f"{origin} has {len(ids)} tokens, but the model's context is {context} and one must "
            "be left to generate; shorten it"
        )
    if max(ids) >= config.vocab_size:
        raise InputError(
            f"{origin} has token id {max(ids)}, but the model's vocabulary is {config.vocab_size}; "
            "the tokenizer is of another model"
        )


def _rounded_len(longest: int, context: int) -> int:
    """Round up to a power of two: prompts of about the same length share compiled programs."""
    return min(context, max(256, 1 << (longest - 1).bit_length()))


@contextlib.contextmanager
def bad_input(prefix: str = "") -> Iterator[None]:
    """Report what is wrong with files and options as the user's to fix, in one line.

    Raises:
        InputError: In place of an error that names something given.
    """
    try:
        yield
    except (ValueError, OSError, NotImplementedError) as error:
        raise InputError(prefix + " ".join(str(error).split())) from error


# ----------------------------------------------------------------------------------------- model


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineShape:
    """How much an engine does at once: see `detjax.serving.engine.EngineConfig`."""

    batch_size: int
    prefill_chunk: int
    max_len: int


@runtime_checkable
class GeneratesCompletions(Protocol):
    """What the command needs of an engine; `detjax.serving.engine.Engine` is one."""

    stats: Any

    def generate(
        self, requests: Sequence[Request], *, on_token: Callable[[TokenEvent], bool]
    ) -> list[Completion]:
        """Run requests to their end."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenModel:
    """A model on its devices, as far as the command sees it.

    Attributes:
        fingerprint: Hash of everything that decides a bit.
        backend: Which kernels run it.
        backend_reason: Why these.
        make_engine: Allocates a cache and what else it takes to generate.
    """

    fingerprint: str
    backend: str
    backend_reason: str
    make_engine: Callable[[EngineShape], GeneratesCompletions]


def read_model_files(args: GenerateArgs) -> tuple[Path, ModelConfig, Tokenizer]:
    """Find the model's folder and read what is small.

    Raises:
        InputError: If the folder or a file in it is missing, broken or not known.
    """
    from detjax.models.bundled import bundled_model_path
    from detjax.models.hf_config import load_config
    from detjax.models.weights import resolve_model

    with bad_input("--model: "):
        if args.model == BUNDLED:
            folder = bundled_model_path()
        else:
            folder = resolve_model(args.model, revision=args.revision)
        return folder, load_config(folder), Tokenizer.from_folder(folder)


def open_model(args: GenerateArgs, folder: Path, display: "Display") -> OpenModel:
    """Choose numerics, kernels and mesh, and load the weights.

    Raises:
        InputError: If they do not go together, cannot run here, or the weights are broken.
    """
    from detjax.models.loading import load_model
    from detjax.numerics import NumericsProfile
    from detjax.pallas_kernels.backend import Backend, choose_backend
    from detjax.parallel.mesh import configure_virtual_devices, make_mesh
    from detjax.serving.engine import Engine, EngineConfig

    _keep_compiled_programs(args.cache_dir)
    with bad_input():
        profile = NumericsProfile(weight_dtype=args.dtype, compute_dtype=args.compute)
        configure_virtual_devices(args.dp * args.tp)
        choice = choose_backend(None if args.backend == "auto" else Backend(args.backend))
    with bad_input(f"--dp {args.dp} --tp {args.tp}: "):
        mesh = make_mesh(args.dp, args.tp)
    with bad_input():
        with display.loading() as progress:
            model = load_model(
                str(folder),
                revision=None,
                profile=profile,
                mesh=mesh,
                backend=choice.backend,
                progress=progress,
            )

    def make_engine(shape: EngineShape) -> Engine:
        with bad_input():
            return Engine(model, EngineConfig(**dataclasses.asdict(shape)))

    return OpenModel(
        fingerprint=model.fingerprint,
        backend=choice.backend.value,
        backend_reason=choice.reason,
        make_engine=make_engine,
    )


def _keep_compiled_programs(cache_dir: str) -> None:
    """Let JAX keep every compiled program, however small, in `cache_dir`."""
    import jax

    if cache_dir == NO_CACHE:
        return
    folder = Path(cache_dir).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"--cache-dir {folder} cannot be made: {error.strerror}; give another, or {NO_CACHE}"
        ) from error
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


# --------------------------------------------------------------------------------------- display


class Display:
    """Everything on standard error but the one line of an error."""

    def __init__(self):
        """Write to standard error, with what its kind of terminal can show."""
        import rich.console

        self._console = rich.console.Console(stderr=True, highlight=False, soft_wrap=True)
        self._status = self._console.status("")
        self._is_busy = False

    def facts(self, facts: Mapping[str, str]) -> None:
        """Write a line for each: its name, and what it is."""
        from rich.text import Text

        for name, value in facts.items():
            self._console.print(Text.assemble((f"{name:<11}", "dim"), " ", value))

    def line(self, text: str, *, style: str = "") -> None:
        """Write a line."""
        from rich.text import Text

        self._console.print(Text(text, style=style))

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Write a table."""
        from rich.table import Table

        table = Table(*columns, title=title, title_justify="left")
        for row in rows:
            table.add_row(*map(str, row))
        self._console.print(table)

    @contextlib.contextmanager
    def loading(self) -> Iterator[Callable[[str, int, int], None]]:
        """Show how far loading is. Yields a function of (what, done, total)."""
        from rich.progress import Progress

        is_hidden = not self._console.is_terminal
        with Progress(console=self._console, transient=True, disable=is_hidden) as bar:
            task = bar.add_task("load", total=None)

            def progress(what: str, done: int, total: int) -> None:
                bar.update(task, description=what, completed=done, total=total)

            yield progress

    def busy(self, text: str) -> None:
        """Show that something is going on, on a terminal, until `idle`."""
        if not self._console.is_terminal:
            return
        self._status.update(text)
        if not self._is_busy:
            self._status.start()
            self._is_busy = True

    def idle(self) -> None:
        """Take away what `busy` shows."""
        if self._is_busy:
            self._status.stop()
            self._is_busy = False


# ---------------------------------------------------------------------------------------- output


@runtime_checkable
class TextSink(Protocol):
    """Where text is written: standard output."""

    def write(self, text: str, /) -> int:
        """Take text."""
        ...

    def flush(self) -> None:
        """Hand on what was taken."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """A completion and its text."""

    completion: Completion
    text: str


class AbstractWriter(abc.ABC):
    """Writes completions one after the other, each from its first token on."""

    @abc.abstractmethod
    def begin(self, index: int, sample: int) -> None:
        """Begin a completion."""

    @abc.abstractmethod
    def write(self, text: str) -> None:
        """Take more of its text."""

    @abc.abstractmethod
    def end(self, record: Record) -> None:
        """End it."""


class SilentWriter(AbstractWriter):
    """Writes nothing: one JSON document is written at the end, and a check's other runs never."""

    def begin(self, index: int, sample: int) -> None:
        """Do nothing."""

    def write(self, text: str) -> None:
        """Do nothing."""

    def end(self, record: Record) -> None:
        """Do nothing."""


class TextWriter(AbstractWriter):
    """Writes text as it is made, under a line that names it where there are several."""

    def __init__(self, out: TextSink, *, has_headers: bool):
        """Write to `out`."""
        self._out = out
        self._has_headers = has_headers

    def begin(self, index: int, sample: int) -> None:
        """Name the completion."""
        if self._has_headers:
            self._out.write(f"=== prompt {index}, sample {sample} ===\n")

    def write(self, text: str) -> None:
        """Write at once, not when a line is full."""
        self._out.write(text)
        self._out.flush()

    def end(self, record: Record) -> None:
        """End the line."""
        self._out.write("\n")
        self._out.flush()


class JsonLinesWriter(AbstractWriter):
    """Writes a line of JSON when a completion ends."""

    def __init__(self, out: TextSink, *, fingerprint: str):
        """Write to `out`."""
        self._out = out
        self._fingerprint = fingerprint

    def begin(self, index: int, sample: int) -> None:
        """Wait for the end."""

    def write(self, text: str) -> None:
        """Wait for the end."""

    def end(self, record: Record) -> None:
        """Write the line."""
        self._out.write(to_json(json_entry(record, self._fingerprint)) + "\n")
        self._out.flush()


def to_json(value: Any) -> str:
    """Dump on one line; characters are written as they are."""
    return json.dumps(value, ensure_ascii=False)


def json_entry(record: Record, fingerprint: str) -> dict[str, Any]:
    """Return a completion as JSON has it; `--help` describes it."""
    done = record.completion
    entry = {
        "index": done.request_idx,
        "sample": done.sample_idx,
        "prompt_token_ids": list(done.prompt_token_ids),
        "token_ids": list(done.token_ids),
        "text": record.text,
        "finish_reason": done.finish_reason.value,
        # ROUND: none; float32 to float64 is exact, and JSON's decimal names that float64.
        "logprobs": [float(logprob) for logprob in done.logprobs],
    }
    if any(done.top_logprobs):
        entry["top_logprobs"] = [
            [[token_id, float(logprob)] for token_id, logprob in top] for top in done.top_logprobs
        ]
    return {**entry, "digest": done.digest(), "fingerprint": fingerprint}


def digest_of_all(records: Sequence[Record]) -> str:
    """Return the digest of one completion; of several, sha256 over theirs, in order."""
    digests = [record.completion.digest() for record in records]
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256(b"".join(map(bytes.fromhex, digests))).hexdigest()


class Transcript:
    """Follows the samples of one run: their texts, when each ends, and whose turn it is."""

    def __init__(self, job: Job, tokenizer: Tokenizer, writer: AbstractWriter):
        """Begin, with nothing written."""
        self._job = job
        self._writer = writer
        self._samples = [_Sample(job, tokenizer, *key) for key in job.samples]
        self._of_key = dict(zip(job.samples, self._samples, strict=True))
        self._num_written = 0

    @property
    def num_ended(self) -> int:
        """Completions that have ended."""
        return sum(sample.finish_reason is not None for sample in self._samples)

    @property
    def records(self) -> tuple[Record, ...]:
        """All completions; each must have ended."""
        return tuple(sample.record() for sample in self._samples)

    def on_token(self, event: TokenEvent) -> bool:
        """Take a token; return True if a stop string is complete."""
        sample = self._of_key[event.request_idx, event.sample_idx]
        is_stopped = sample.push(event)
        self._write_in_turn()
        return is_stopped

    def _write_in_turn(self) -> None:
        """Write the first completion that has not ended as far as it goes, and any before it."""
        for sample in self._samples[self._num_written :]:
            if sample.write_to(self._writer):
                self._num_written += 1
            else:
                return


class _Sample:
    """One completion while it is made."""

    def __init__(self, job: Job, tokenizer: Tokenizer, index: int, sample: int):
        self._key = (index, sample)
        self._request = job.requests[index]
        self._end_ids = job.end_ids
        self._stream = TextStream(
            tokenizer, job.stop_strings, prompt_ids=self._request.prompt_token_ids
        )
        self._events: list[TokenEvent] = []
        self._texts: list[str] = []
        self._num_written = 0
        self._has_begun = False
        self.finish_reason: FinishReason | None = None

    def push(self, event: TokenEvent) -> bool:
        """Take a token; return True if a stop string is complete."""
        assert self.finish_reason is None, f"{self._key} got a token after its end"
        self._events.append(event)
        delta = self._stream.push(event.token_id)
        self._texts.append(delta.text)
        if delta.is_stopped or event.token_id in self._end_ids:
            self.finish_reason = FinishReason.STOP
        elif len(self._events) == self._request.sampling.max_tokens:
            self.finish_reason = FinishReason.LENGTH
        if self.finish_reason is not None:
            self._texts.append(self._stream.finish())
        return delta.is_stopped

    def write_to(self, writer: AbstractWriter) -> bool:
        """Write what is new; return True if this completion is now written to its end."""
        if self._events and not self._has_begun:
            self._has_begun = True
            writer.begin(*self._key)
        for text in filter(None, self._texts[self._num_written :]):
            writer.write(text)
        self._num_written = len(self._texts)
        if self.finish_reason is not None:
            writer.end(self.record())
        return self.finish_reason is not None

    def record(self) -> Record:
        """Return the completion, which must have ended."""
        assert self.finish_reason is not None, f"{self._key} has not ended"
        completion = Completion(
            request_idx=self._key[0],
            sample_idx=self._key[1],
            prompt_token_ids=self._request.prompt_token_ids,
            token_ids=tuple(event.token_id for event in self._events),
            logprobs=tuple(event.logprob for event in self._events),
            top_logprobs=tuple(event.top_logprobs for event in self._events),
            finish_reason=self.finish_reason,
        )
        return Record(completion=completion, text="".join(self._texts))


# ------------------------------------------------------------------------------------------ runs


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """One way to compute a job.

    Attributes:
        shape: How much the engine does at once.
        order_name: How `order` came about, for people.
        order: The requests of the engine, as indices into those of the job; None is a
            neighbour, a request whose answer nobody wants.
    """

    shape: EngineShape
    order_name: str
    order: tuple[int | None, ...]

    @property
    def num_neighbours(self) -> int:
        """Requests beside those of the job."""
        return self.order.count(None)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """What a run gave, and when its first token came, in seconds since the process started."""

    records: tuple[Record, ...]
    stats: Any
    first_token_s: float


def run_job(
    job: Job,
    plan: RunPlan,
    model: OpenModel,
    tokenizer: Tokenizer,
    *,
    writer: AbstractWriter,
    display: Display,
    is_live: bool,
) -> RunResult:
    """Compute a job as `plan` says, and write its completions as they come.

    Args:
        job: What to compute.
        plan: How.
        model: With what.
        tokenizer: That of the model.
        writer: Where completions go.
        display: Where progress goes.
        is_live: Text appears on the terminal, so progress must end when it begins.
    """
    transcript = Transcript(job, tokenizer, writer)
    engine = model.make_engine(plan.shape)
    times: list[float] = []
    counter = itertools.count(1)

    def on_token(event: TokenEvent) -> bool:
        if not times:
            times.append(process_age_s())
        index = plan.order[event.request_idx]
        num_tokens = next(counter)
        if is_live:
            display.idle()
        else:
            ended = f"{transcript.num_ended} of {len(job.samples)} completions"
            display.busy(f"{ended}, {num_tokens} tokens")
        if index is None:
            return False
        return transcript.on_token(dataclasses.replace(event, request_idx=index))

    display.busy("compiling and reading the prompts")
    try:
        completions = engine.generate(_requests(job, plan), on_token=on_token)
    finally:
        display.idle()
    records = transcript.records
    _check_told_the_same(completions, records, plan)
    return RunResult(records=records, stats=engine.stats, first_token_s=times[0])


def _requests(job: Job, plan: RunPlan) -> list[Request]:
    """Return what the engine is asked, neighbours included."""
    neighbours = (_neighbour(job, i) for i in itertools.count())
    return [next(neighbours) if i is None else job.requests[i] for i in plan.order]


def _neighbour(job: Job, number: int) -> Request:
    """Return a request unlike those of the job: another prompt, length and sampling."""
    like = job.requests[number % len(job.requests)]
    ids = like.prompt_token_ids[::-1][: 1 + number * 7 % len(like.prompt_token_ids)]
    sampling = SamplingParams(
        max_tokens=1 + (3 + number * 5) % like.sampling.max_tokens,
        temperature=0.5 + 0.25 * (number % 4),
        top_k=20 * (number % 3),
        seed=number,
    )
    return Request(prompt_token_ids=ids, sampling=sampling)


def _check_told_the_same(
    completions: Sequence[Completion], records: Sequence[Record], plan: RunPlan
) -> None:
    """Stop if the engine's tokens, one by one, were not the completions that it returned."""
    told = {
        (plan.order[c.request_idx], c.sample_idx): (c.digest(), c.finish_reason)
        for c in completions
    }
    for record in records:
        ours = record.completion
        key = (ours.request_idx, ours.sample_idx)
        assert told[key] == (ours.digest(), ours.finish_reason), f"{key}: {told[key]}"


def process_age_s() -> float:
    """Return seconds since this process started; since this module's import where unknown."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, AttributeError, ValueError, IndexError):
        return time.perf_counter() - _IMPORTED_S


# ----------------------------------------------------------------------------------------- check

_BATCH_SIZES = (1, 3, 2, 5, 8, 17)
_NUM_CHUNKS = (2, 5, 1, 3, 7)
_MOST_CHUNKS = 64
_LONGEST_CHUNK = 512
_MOST_LINES = 10


def plan_runs(args: GenerateArgs, job: Job) -> tuple[RunPlan, ...]:
    """Return the runs: the first as asked, the others each at another size, order and chunk."""
    indices = tuple(range(len(job.requests)))
    asked = EngineShape(
        batch_size=args.batch_size, prefill_chunk=args.prefill_chunk, max_len=job.max_len
    )
    plans = [RunPlan(shape=asked, order_name="as given", order=indices)]  # run 1
    half = len(indices) // 2
    orders = {
        "reversed": indices[::-1],
        "second half first": indices[half:] + indices[:half],
        "odd ones first": indices[1::2] + indices[::2],
        "as given": indices,
    }
    longest = max(len(request.prompt_token_ids) for request in job.requests)
    for i in range(args.repeat - 1):
        order_name, order = list(orders.items())[i % len(orders)]
        order_name = order_name if len(indices) > 1 else "only one"
        batch_size = _BATCH_SIZES[i % len(_BATCH_SIZES)] * args.dp
        num_chunks = _NUM_CHUNKS[i % len(_NUM_CHUNKS)]
        chunk = max(math.ceil(longest / num_chunks), math.ceil(longest / _MOST_CHUNKS))
        num_neighbours = max(0, batch_size - len(job.samples))
        before = num_neighbours * (i % 3) // 2
        plans.append(
            RunPlan(
                shape=EngineShape(
                    batch_size=batch_size,
                    prefill_chunk=min(chunk, _LONGEST_CHUNK),
                    max_len=job.max_len,
                ),
                order_name=order_name,
                order=(None,) * before + order + (None,) * (num_neighbours - before),
            )
        )
    return tuple(plans)


def show_plan(plans: Sequence[RunPlan], display: Display) -> None:
    """Write what the runs differ in."""
    display.table(
        "runs to compare",
        ("run", "batch size", "prefill chunk", "order of prompts", "neighbours"),
        (
            (
                number,
                plan.shape.batch_size,
                plan.shape.prefill_chunk,
                plan.order_name,
                plan.num_neighbours,
            )
            for number, plan in enumerate(plans, start=1)
        ),
    )


def differences(expected: Sequence[Record], actual: Sequence[Record]) -> list[str]:
    """Return a line for each completion of which a bit differs, with the first such place."""
    lines = []
    for one, other in zip(expected, actual, strict=True):
        found = _first_difference(one.completion, other.completion)
        if found:
            where = f"prompt {one.completion.request_idx}, sample {one.completion.sample_idx}"
            lines.append(f"{where}, {found}")
    return lines


def _first_difference(one: Completion, other: Completion) -> str:
    """Describe the first place where two completions differ; empty where none does."""
    for i, (id_1, id_2) in enumerate(zip(one.token_ids, other.token_ids, strict=False)):
        if id_1 != id_2:
            return f"token {i}: id {id_1} (0x{id_1:08x}) against {id_2} (0x{id_2:08x})"
        bits_1, bits_2 = _bits(one.logprobs[i]), _bits(other.logprobs[i])
        if bits_1 != bits_2:
            return f"token {i}: logprob {bits_1} against {bits_2}"
        if found := _top_difference(one.top_logprobs[i], other.top_logprobs[i]):
            return f"token {i}: {found}"
    if len(one.token_ids) != len(other.token_ids):
        return f"length: {len(one.token_ids)} tokens against {len(other.token_ids)}"
    if one.finish_reason is not other.finish_reason:
        return f"end: {one.finish_reason.value} against {other.finish_reason.value}"
    return ""


def _top_difference(
    one: Sequence[tuple[int, np.float32]], other: Sequence[tuple[int, np.float32]]
) -> str:
    for rank, ((id_1, logprob_1), (id_2, logprob_2)) in enumerate(zip(one, other, strict=True)):
        if id_1 != id_2 or _bits(logprob_1) != _bits(logprob_2):
            first, second = f"{id_1} {_bits(logprob_1)}", f"{id_2} {_bits(logprob_2)}"
            return f"top logprob {rank}: id {first} against {second}"
    return ""


def _bits(value: np.float32) -> str:
    return f"{float(value)!r} (0x{int(np.float32(value).view(np.uint32)):08x})"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """How many runs were compared, and what differs between the first and another."""

    num_runs: int
    lines: tuple[str, ...]


def check_runs(
    first: RunResult,
    plans: Sequence[RunPlan],
    run_again: Callable[[RunPlan], RunResult],
    display: Display,
) -> CheckResult:
    """Run every plan but the first, which has been run, and compare with it."""
    lines = []
    for number, plan in enumerate(plans[1:], start=2):
        found = differences(first.records, run_again(plan).records)
        verdict = f"{len(found)} completions differ from run 1" if found else "equal to run 1"
        display.line(f"run {number} of {len(plans)}: {verdict}")
        lines.extend(f"run {number} differs from run 1 at {line}" for line in found)
    return CheckResult(num_runs=len(plans), lines=tuple(lines))


def show_check(result: CheckResult, digest: str, display: Display) -> None:
    """Write the verdict."""
    for line in result.lines[:_MOST_LINES]:
        display.line(line, style="red")
    if len(result.lines) > _MOST_LINES:
        display.line(f"and {len(result.lines) - _MOST_LINES} more", style="red")
    if result.lines:
        display.line(f"check failed: the {result.num_runs} runs are not equal", style="bold red")
    else:
        display.line(f"all {result.num_runs} runs equal, digest {digest}", style="bold green")


# ------------------------------------------------------------------------------------------ main


def run(
    args: GenerateArgs,
    *,
    open_model: Callable[[GenerateArgs, Path, Display], OpenModel] = open_model,
) -> int:
    """Do what the command line asks; return the exit code.

    Raises:
        InputError: If something given cannot be done.
    """
    prompts = read_prompts(args)
    folder, config, tokenizer = read_model_files(args)
    job = make_job(args, prompts, tokenizer, config)
    plans = plan_runs(args, job)
    display = Display()
    started_s = time.perf_counter()
    model = open_model(args, folder, display)
    load_s = time.perf_counter() - started_s
    display.facts(_card(args, folder, config, model, plans[0].shape))
    if args.check:
        show_plan(plans, display)

    def run_again(plan: RunPlan) -> RunResult:
        silent = SilentWriter()
        return run_job(job, plan, model, tokenizer, writer=silent, display=display, is_live=False)

    first = run_job(
        job,
        plans[0],
        model,
        tokenizer,
        writer=_writer(args, job, model),
        display=display,
        is_live=args.format == "text" and sys.stdout.isatty(),
    )
    stats = _stats(first, load_s)
    check = check_runs(first, plans, run_again, display) if args.check else None
    if args.format == "json":
        print(to_json(_document(args, folder, first, model, stats, check)), flush=True)
    _show_end(first, stats, display, with_digests=args.format == "text")
    if check is not None:
        show_check(check, digest_of_all(first.records), display)
    return BITS_DIFFER if check is not None and check.lines else OK


def _writer(args: GenerateArgs, job: Job, model: OpenModel) -> AbstractWriter:
    if args.format == "text":
        return TextWriter(sys.stdout, has_headers=len(job.samples) > 1)
    if args.format == "jsonl":
        return JsonLinesWriter(sys.stdout, fingerprint=model.fingerprint)
    return SilentWriter()


def _card(
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


def _stats(result: RunResult, load_s: float) -> dict[str, int | float]:
    """Return where the time went, as JSON has it."""
    stats = result.stats
    return {
        "load_s": load_s,
        "compile_s": stats.compile_s,
        "prefill_s": stats.prefill_s,
        "prefill_tokens": stats.prefill_tokens,
        "decode_s": stats.decode_s,
        "decode_tokens": stats.decode_tokens,
        "first_token_s": result.first_token_s,
    }


def _document(
    args: GenerateArgs,
    folder: Path,
    result: RunResult,
    model: OpenModel,
    stats: Mapping[str, int | float],
    check: CheckResult | None,
) -> dict[str, Any]:
    """Return the one document of `--format json`."""
    document = {
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
        document["check"] = {"num_runs": check.num_runs, "differences": list(check.lines)}
    return document


def _show_end(
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


def main(
    argv: Sequence[str] | None = None,
    *,
    open_model: Callable[[GenerateArgs, Path, Display], OpenModel] = open_model,
) -> int:
    """Run the command; return its exit code. See `--help` for what each means."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")
    try:
        return run(parse_args(argv), open_model=open_model)
    except (InputError, FloatingPointError) as error:  # the latter: NaN in the weights
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # WHY: Python would try to flush again at exit, and report that this fails.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    except Exception:
        traceback.print_exc()
        print("error: this is a fault of detjax; please report the lines above", file=sys.stderr)
        return INTERNAL_ERROR


if __name__ == "__main__":
    sys.exit(main())
