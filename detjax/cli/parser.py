# SPDX-License-Identifier: Apache-2.0
"""Reads the command line: the parser, its `--help`, and the checks that need no model."""

import argparse
import dataclasses
import difflib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from detjax import __version__
from detjax.cli.arguments import (
    GROUPS,
    NO_CACHE,
    NO_CAST,
    GenerateArgs,
    sampling_params,
)
from detjax.cli.errors import (
    BAD_INPUT,
    BITS_DIFFER,
    INTERNAL_ERROR,
    INTERRUPTED,
    OK,
    READER_GONE,
    InputError,
    bad_input,
    check_unicode,
)
from detjax.cli.receipts import check_can_sign
from detjax.models.bundled import BUNDLED

DESCRIPTION = """\
Continue prompts with a Llama, Mistral or Qwen model. The token ids and the float32 logprobs of a
completion are the same bits in any batch, mesh and schedule; its digest is a hash of them. Only
--mode fast makes no such claim.

Text goes to standard output, everything else to standard error."""

EPILOG = f"""\
examples:
  python -m detjax.generate --prompt "It was a dark night"
  python -m detjax.generate --prompt "17+26=" --max-tokens 4 --logprobs 3 --format jsonl
  python -m detjax.generate --model Qwen/Qwen3-0.6B --chat --prompt "Why is the sky blue?"
  echo "Once upon a time" | python -m detjax.generate --prompt - --temperature 0.8 --n 4
  python -m detjax.generate --prompts-file prompts.jsonl --batch-size 16 --tp 4 --format jsonl
  python -m detjax.generate --prompt "It was a dark night" --repeat 4 --check
  python -m detjax.generate --prompt "It was a dark night" --expect-digest DIGEST
  python -m detjax.generate --prompt "It was a dark night" --receipts answers.jsonl
  python -m detjax.generate --prompt "It was a dark night" --mode dvr --repeat 2 --check --stats
  python -m detjax.generate --prompt "It was a dark night" --mode fast --repeat 4 --check

JSON: per completion `index` (of the prompt), `sequence`, `prompt_token_ids`, `token_ids` (with the
one that ended it), `text`, `finish_reason` (stop or length), `logprobs`, `top_logprobs` (with
--logprobs: [token id, logprob] pairs), `sampling` as it was used, `digest` (sha256 of the token ids
as int32 and the logprobs as float32, little-endian), `fingerprint` (of numerics and build) and
`model` (its name and hashes of weights, configuration and tokenizer). A logprob is the float32
written as the shortest decimal of its exact value as a float64: read it back, round to float32, and
no bit is lost.

exit codes: {OK} success; {BAD_INPUT} bad input, with one line that says which and how to fix it;
{BITS_DIFFER} --check, --expect-digest or a self-check found a bit that differs; {INTERNAL_ERROR} an
error of detjax; {INTERRUPTED} interrupted; {READER_GONE} the reader of standard output went
away."""


def _check_file(option: str, name: str) -> None:
    """See that a file can be written before there is something to write."""
    path = Path(name)
    if not name or path.is_dir():
        raise InputError(f"{option} {name!r} is no file; give the name of one")
    if not path.absolute().parent.is_dir():
        raise InputError(f"{option} {name} is in a folder that does not exist; make it first")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise InputError(f"{option} {name} cannot be written; give another file")


def _check_receipts(args: GenerateArgs) -> None:
    """See that receipts can be made and signed before there is an answer."""
    if args.receipts is None:
        if args.sign is not None:
            raise InputError(f"--sign {args.sign} signs receipts; add --receipts FILE")
        return
    _check_file("--receipts", args.receipts)
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
    with bad_input("--receipts: "):
        check_can_sign(args.sign)


def _nearest(given: str, known: Sequence[str]) -> str:
    """The option that was meant: one that begins so, or is spelled much like it; or none."""
    word = given.lstrip("-")
    names = {name.lstrip("-"): name for name in known}
    begun = [name for name in names if word and name.startswith(word)]
    alike = begun or difflib.get_close_matches(word, names, n=1, cutoff=0.7)
    return names[alike[0]] if alike else ""


class _Parser(argparse.ArgumentParser):
    """Reports a mistake as every other one is reported."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage.

        Raises:
            InputError: Always.
        """
        known = [name for action in self._actions for name in action.option_strings]
        _, _, rest = message.partition("unrecognized arguments: ")
        near = _nearest(rest.split("=")[0].split(" ")[0], known)
        hint = f"; did you mean {near}?" if near else "; see --help"
        raise InputError(message.removeprefix("argument ") + hint)


_OTHER_NAMES = {"tp": ["--tensor-parallel-size"], "batch_size": ["--max-num-seqs"]}
"""vLLM's names of options that mean the same."""


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
    parser.add_argument("--version", action="version", version=f"detjax {__version__}")
    groups = {name: parser.add_argument_group(name, text) for name, text in GROUPS.items()}
    for option in dataclasses.fields(GenerateArgs):
        if not option.metadata:
            continue
        described, default = option.metadata, option.default
        if isinstance(default, bool):
            with_no = argparse.BooleanOptionalAction
            kind: dict[str, Any] = {"action": with_no if default else "store_true"}
        elif isinstance(default, tuple):
            kind = {"action": "append", "type": described["type"], **described["shown"]}
        else:
            parse = described["type"] if default is None else type(default)
            kind = {"type": parse, **described["shown"]}
        names = ["--" + option.name.replace("_", "-"), *_OTHER_NAMES.get(option.name, ())]
        groups[described["group"]].add_argument(*names, help=described["help"], **kind)
    return parser


def parse_args(argv: Sequence[str] | None) -> GenerateArgs:
    """Read the command line and check what needs no model.

    Raises:
        InputError: If a value cannot be read, is out of range or does not go with another.
    """
    values = vars(make_parser().parse_args(argv))
    given = frozenset(values)
    values.setdefault("compute", values.get("dtype", "bfloat16"))
    for option in dataclasses.fields(GenerateArgs):
        if isinstance(option.default, tuple):
            values[option.name] = tuple(values.get(option.name, ()))
    args = GenerateArgs(**values, given=given)
    _check_args(args)
    return args


_MOST = {
    "tp": 2**20,
    "dp": 2**20,
    "batch_size": 2**16,
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
    if args.draft_weights != "full" and args.mode != "dvr":
        raise InputError(f"--draft-weights {args.draft_weights} needs --mode dvr, which drafts")
    if args.mode == "dvr" and args.decode_steps > max(1, args.verify_window - 1):
        raise InputError(
            f"--decode-steps {args.decode_steps} must be at most --verify-window - 1 = "
            f"{args.verify_window - 1} with --mode dvr, the drafts of a window"
        )
    if args.prompt_lookup and args.decode_steps > 1:
        raise InputError(
            f"--decode-steps {args.decode_steps} does not go with --prompt-lookup, which reads "
            "every token before it proposes the next"
        )
    if args.prompt_lookup and args.mode != "invariant":
        raise InputError(f"--prompt-lookup goes with --mode invariant, not {args.mode}")
    if args.cast_weights not in (NO_CAST, args.dtype):
        raise InputError(
            f"--cast-weights {args.cast_weights} does not go with --dtype {args.dtype}, which "
            "holds every checkpoint exactly; leave one out"
        )
    for name, most in _MOST.items():
        value = getattr(args, name)
        if value is not None and not 1 <= value <= most:
            flag = "--" + name.replace("_", "-")
            bound = "at least 1" if value < 1 else f"at most {most}"
            raise InputError(f"{flag} {value} must be {bound}")
    if args.batch_size is not None and args.batch_size % args.dp:
        raise InputError(
            f"--batch-size {args.batch_size} must be a multiple of --dp {args.dp}, so that each "
            "replica has as many rows"
        )
    if args.cache_pages < 0 or args.cache_pages % args.dp:
        raise InputError(
            f"--cache-pages {args.cache_pages} must be a multiple of --dp {args.dp}, or 0"
        )
    share = args.gpu_memory_utilization
    if share is not None and not 0 < share <= 1:
        raise InputError(f"--gpu-memory-utilization {share} must be above 0 and at most 1")
    if share is not None and args.cache_pages:
        raise InputError(
            f"--gpu-memory-utilization {share} does not go with --cache-pages {args.cache_pages}, "
            "which says how large the cache is; leave one out"
        )
    if args.trace is not None:
        _check_file("--trace", args.trace)
    _check_receipts(args)
    if args.coordinator is not None and "-" in args.prompt:
        raise InputError("--prompt - reads what only one process has; give --prompts-file instead")
    if args.revision is not None and args.model == BUNDLED:
        raise InputError(f"--revision {args.revision} needs a Hugging Face id as --model")
    if args.warm and args.cache_dir == NO_CACHE:
        raise InputError(f"--warm keeps programs, and --cache-dir {NO_CACHE} keeps none; drop one")
    if args.warm and (args.check or args.check_process or args.expect_digest):
        raise InputError("--warm computes no answer to check; leave the checks out")
    if args.check and args.repeat < 2:
        raise InputError("--check compares runs: give it --repeat N with N of at least 2")
    if args.repeat > 1 and not args.check:
        raise InputError(f"--repeat {args.repeat} only means something with --check; add it")
    if args.expect_digest is not None and not _DIGEST.fullmatch(args.expect_digest):
        raise InputError(
            f"--expect-digest {args.expect_digest!r} is no digest: give the 64 hexadecimal digits "
            "that an earlier run printed"
        )
    if args.logprobs and args.format == "text":
        raise InputError("--logprobs has no place in text; add --format jsonl or --format json")
    for name in ("stop", "bad_word"):
        flag = "--" + name.replace("_", "-")
        for text in getattr(args, name):
            if not text:
                raise InputError(f"{flag} is empty; every completion would have it at once")
            check_unicode(text, flag)
    sampling_params(args)
