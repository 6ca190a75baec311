# SPDX-License-Identifier: Apache-2.0
"""The parser of `python -m detjax.generate`, its `--help`, and the checks that need no model."""

import dataclasses
import re
from collections.abc import Sequence

from detjax.cli.arguments import (
    GROUPS,
    OPTIONS,
    GenerateArgs,
    as_flags,
    engine_options,
    sampling_params,
)
from detjax.cli.command_line import CommandParser, check_file, check_replicas, check_share
from detjax.cli.errors import EXIT_CODES, InputError, bad_input, check_unicode
from detjax.cli.options import NO_CACHE, add_options
from detjax.cli.receipts import check_can_sign
from detjax.defaults import NO_CAST, check_cache_dtype, kv_cache_dtype_of
from detjax.engine.config import check_adapter_mode
from detjax.models.adapters.limits import check_adapter_sizes

DESCRIPTION = """\
Continue prompts with a language model (docs/models.md lists the families). The token ids and the
float32 logprobs of a completion have the same bits in any batch, mesh and schedule. The printed
digest is a hash of them. Only --mode fast makes no such claim.

Text goes to standard output, everything else to standard error."""

EPILOG = f"""\
examples:
  python -m detjax.generate -p "It was a dark night"
  python -m detjax.generate -p "17+26=" --max-tokens 4 --logprobs 3 --format jsonl -o sums.jsonl
  python -m detjax.generate -m Qwen/Qwen3-0.6B --chat -p "Why is the sky blue?"
  echo "Once upon a time" | python -m detjax.generate -p - --temperature 0.8 --n 4
  python -m detjax.generate --prompts-file prompts.jsonl --batch-size 16 --tp 4 --format jsonl
  python -m detjax.generate -p "It was a dark night" --repeat 4 --check
  python -m detjax.generate -p "It was a dark night" --expect-digest DIGEST
  python -m detjax.generate -p "It was a dark night" --receipts answers.jsonl
  python -m detjax.generate -p "It was a dark night" --mode dvr --repeat 2 --check --stats
  python -m detjax.generate -p "It was a dark night" --mode fast --repeat 4 --check

JSON, one object per completion:
  index             of the prompt, from 0
  sequence          of the --n of the prompt, from 0
  prompt_token_ids
  token_ids         with the token that ended the completion
  text
  finish_reason     stop or length
  logprobs          float32, written as the shortest decimal of the value as a float64; read it and
                    round it to float32, and no bit is lost
  top_logprobs      with --logprobs: [token id, logprob] pairs
  sampling          the parameters that were used
  digest            sha256 of the token ids (int32) and logprobs (float32), little-endian
  fingerprint       hash of numerics and build
  model             name, and hashes of weights, configuration and tokenizer

{EXIT_CODES}"""


def make_parser() -> CommandParser:
    """Make the parser from the fields of `GenerateArgs`. It sets only what was given."""
    parser = CommandParser(
        "generate",
        usage="%(prog)s --prompt TEXT [options]",
        description=DESCRIPTION,
        epilog=EPILOG,
        only_given=True,
    )
    fields = [its for its in dataclasses.fields(GenerateArgs) if its.metadata]
    for title, text in GROUPS.items():
        members = [its.metadata["option"] for its in fields if its.metadata["group"] == title]
        add_options(parser, title, members, text)
    return parser


def parse_args(argv: Sequence[str] | None) -> GenerateArgs:
    """Read the command line and check what needs no model.

    Raises:
        InputError: If a value cannot be read, is out of range or does not go with another.
    """
    values = vars(make_parser().parse(argv))
    values.pop("config", None)
    given = frozenset(values)
    values.setdefault("compute", values.get("dtype", "bfloat16"))
    for name, option in OPTIONS.items():
        if isinstance(option.default, tuple):
            values[name] = tuple(values.get(name, ()))
    args = GenerateArgs(**values, given=given)
    _check_args(args)
    return args


_MOST = {
    "tp": 2**20,
    "dp": 2**20,
    "batch_size": 2**16,
    "max_tokens": 2**40,
    "max_len": 2**31,
    "prefill_chunk": 2**40,
    "verify_window": 2**10,
    "verify_rows": 2**10,
    "decode_steps": 2**10,
    "n": 2**10,
    "repeat": 2**10,
}
"""Options that count something: above these is a mistake, which would take memory and minutes."""


_DIGEST = re.compile("[0-9a-f]{64}")


def _check_args(args: GenerateArgs) -> None:
    for name, most in _MOST.items():
        value = getattr(args, name)
        if value is not None and not 1 <= value <= most:
            bound = "at least 1" if value < 1 else f"at most {most}"
            raise InputError(f"{OPTIONS[name].flag} {value} must be {bound}")
    _check_engine(args)
    _check_files(args)
    _check_warm(args)
    _check_checks(args)
    for name in ("stop", "bad_words"):
        flag = OPTIONS[name].flag
        for text in getattr(args, name):
            if not text:
                raise InputError(f"{flag} is empty; every completion would have it at once")
            check_unicode(text, flag)
    if args.system_prompt is not None:
        if not args.system_prompt:
            raise InputError("--system-prompt is empty; give a text, or leave it out")
        check_unicode(args.system_prompt, "--system-prompt")
    sampling_params(args)
    engine_options(args, max_len=1)


def _check_engine(args: GenerateArgs) -> None:
    if args.cast_weights not in (NO_CAST, args.dtype):
        raise InputError(
            f"--cast-weights {args.cast_weights} does not go with --dtype {args.dtype}, which "
            "holds every checkpoint exactly; leave one out"
        )
    check_replicas(args.batch_size, args.num_pages, args.dp)
    with bad_input(rephrase=as_flags):
        has_adapters = args.enable_lora or bool(args.lora_modules)
        check_adapter_mode(args.mode, has_adapters=has_adapters)
        check_adapter_sizes(
            is_enabled=has_adapters,
            max_loras=args.max_loras,
            max_lora_rank=args.max_lora_rank,
            max_expert_lora_rank=args.max_expert_lora_rank,
        )
        check_cache_dtype(kv_cache_dtype_of(args.kv_cache_dtype), args.compute)
    share = args.gpu_memory_utilization
    check_share(share)
    if share is not None and args.num_pages:
        raise InputError(
            f"--gpu-memory-utilization {share} does not go with --cache-pages {args.num_pages}, "
            "which says how large the cache is; leave one out"
        )


def _check_files(args: GenerateArgs) -> None:
    """See that files can be written, and receipts made and signed, before there is an answer."""
    for name in ("trace", "output", "receipts"):
        if (file := getattr(args, name)) is not None:
            check_file(OPTIONS[name].flag, file)
    if args.logprobs and args.format == "text":
        raise InputError("--logprobs has no place in text; add --format jsonl or --format json")
    if args.coordinator is not None and "-" in args.prompt:
        raise InputError("--prompt - reads what only one process has; give --prompts-file instead")
    if args.receipts is None:
        if args.sign is not None:
            raise InputError(f"--sign {args.sign} signs receipts; add --receipts FILE")
        return
    if args.mode == "fast":
        raise InputError(
            "--receipts is for answers that can be checked, and --mode fast promises nothing; use "
            "invariant or dvr"
        )
    if args.coordinator is not None:
        raise InputError(
            "--receipts names the hash of the weights, and in a job of several processes none has "
            "them all; leave it out, or run one process"
        )
    with bad_input():
        check_can_sign(args.sign)


def _check_warm(args: GenerateArgs) -> None:
    if args.warm and args.cache_dir == NO_CACHE:
        raise InputError(f"--warm keeps programs, and --cache-dir {NO_CACHE} keeps none; drop one")
    if args.warm and (args.check or args.check_process or args.expect_digest):
        raise InputError("--warm computes no answer to check; leave the checks out")


def _check_checks(args: GenerateArgs) -> None:
    if args.check and args.repeat < 2:
        raise InputError("--check compares runs: give it --repeat N with N of at least 2")
    if args.repeat > 1 and not args.check:
        raise InputError(f"--repeat {args.repeat} only means something with --check; add it")
    if args.expect_digest is not None and not _DIGEST.fullmatch(args.expect_digest):
        raise InputError(
            f"--expect-digest {args.expect_digest!r} is no digest: give the 64 hexadecimal digits "
            "that an earlier run printed"
        )
