# SPDX-License-Identifier: Apache-2.0
"""`python -m detjax.diverge`: the first token, layer and operation whose bits differ.

JAX is imported only once the command line is known to be good.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from detjax.cli import options
from detjax.cli.command_line import CommandParser, check_file, check_model_option, output_of
from detjax.cli.errors import (
    BITS_DIFFER,
    EXIT_CODES,
    OK,
    InputError,
    bad_input,
    exit_code,
)
from detjax.cli.options import Option, add_options, in_flags
from detjax.diverge.setting import RecordedAnswer, Setting
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.escaping import escaped_lines
from detjax.models.bundled import BUNDLED_NAME

if TYPE_CHECKING:  # imports JAX
    from detjax.diverge.divergence import Divergence
    from detjax.models.config import ModelConfig
    from detjax.numerics import NumericsProfile
    from detjax.proof.receipt import Receipt

EPILOG = f"""\
A setting is KEY=VALUE,KEY=VALUE. The keys and their defaults:
  tp=1            devices that share each layer; without GPUs, virtual ones
  dp=1            replicas of the model
  batch=1         sequences in the batch: the prompt and batch - 1 others of other lengths
  row=0           row of the prompt in the batch, from 0
  mode=invariant  or dvr, fast
  backend=auto    or sm90, reference, portable
  chunk=64        prompt tokens per prefill step
  path=decode     or prefill: each token is computed by a prefill of all tokens before it
  decode_steps=1  tokens of a sequence per launch
  pages=0         pages of the key and value cache; 0: enough for the batch; fewer cause preemption

examples:
  python -m detjax.diverge tp=1 tp=2,batch=8,chunk=16 -p "The sea"
  python -m detjax.diverge -p "The sea" --b "mode=fast"
  python -m detjax.generate -p "The sea" --format jsonl -o answer.jsonl
  python -m detjax.diverge --answer answer.jsonl --b "batch=8,row=3"
  python -m detjax.diverge --receipt answers.jsonl --line 2 --b "tp=2"
  python -m detjax.diverge --evidence ~/.local/state/detjax/evidence/20261122T190000-7.json

{EXIT_CODES}
"""

_SIDES = (
    Option(
        name="a", metavar="SETTING", default_text="all defaults", help="the first setting, in "
        "place of the first argument",
    ),
    Option(
        name="b", metavar="SETTING", default="", default_text="all defaults",
        help="the second setting, in place of the second argument",
    ),
    Option(
        name="answer", metavar="FILE",
        help="compare this recorded answer with B, in place of --a and --prompt: output of python "
        "-m detjax.generate --format jsonl with --n 1",
    ),
    Option(
        name="receipt", metavar="FILE",
        help="compare this receipt with B, in place of --a and --prompt: output of python -m "
        "detjax.generate --receipts. Model, numerics and sampling are those of the receipt",
    ),
    Option(
        name="evidence", metavar="FILE",
        help="compare two settings that repeat a failed self-check, which has written this file",
    ),
    Option(
        name="line", parse=int, default_text="the only line",
        help="line of --answer or --receipt, from 1",
    ),
)  # fmt: skip
_PROMPT = replace(options.PROMPT, default=None, help="text to continue")
_DEEP = Option(
    name="deep", default=False, help="compare every operation even if the answers are equal"
)
_MODEL = (
    replace(options.MODEL, default=None, default_text="that of the receipt or the evidence, else "
            f"{options.MODEL.shown_default}"),
    options.REVISION,
    options.DTYPE,
    options.KV_CACHE_DTYPE,
    options.CAST_WEIGHTS,
)  # fmt: skip
_SAMPLING = (replace(options.MAX_TOKENS, default=16), *options.SAMPLING[1:])


def make_parser() -> CommandParser:
    """The command line."""
    parser = CommandParser(
        "diverge",
        description="Run a model and a prompt with two settings, A and B, and name the first "
        "operation whose bits\ndiffer. A recorded answer or a receipt can stand for A.",
        epilog=EPILOG,
    )
    parser.add_argument("settings", metavar="SETTING", nargs="*", help="A and B, such as tp=1 "
                        "tp=2; only B with --answer or --receipt")  # fmt: skip
    add_options(parser, "what is compared", (*_SIDES, _PROMPT, _DEEP))
    add_options(parser, "model", _MODEL)
    add_options(parser, "sampling (a recorded answer has its own)", _SAMPLING)
    add_options(parser, "output", (options.FORMAT, options.OUTPUT, options.CACHE_DIR))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    return exit_code(lambda: _run(make_parser().parse(argv)))


def _run(args: argparse.Namespace) -> int:
    if args.output is not None:
        check_file(options.OUTPUT.flag, args.output)
    given = [name for name in ("answer", "receipt", "evidence") if getattr(args, name) is not None]
    if len(given) > 1:
        raise InputError(f"--{given[0]} and --{given[1]} stand for one side; leave one out")
    if given and (args.a is not None or args.prompt is not None):
        raise InputError(f"--{given[0]} stands in place of --a and --prompt; leave those out")
    if args.line is not None and given not in (["answer"], ["receipt"]):
        raise InputError("--line is of --answer or --receipt, which are not given")
    if args.settings:
        args.a, args.b = _positional(args, given)
    if args.model is not None or given in ([], ["answer"]):
        check_model_option(args.model or BUNDLED_NAME, args.revision)
    if given == ["evidence"]:
        divergence = _of_evidence(args)
    else:
        with bad_input("--b: "):
            b = Setting.parse(args.b)
        divergence = _of_receipt(args, b) if given == ["receipt"] else _of_settings(args, b)
    text = (
        json.dumps(divergence.to_dict())
        if args.format == "json"
        else escaped_lines(f"{divergence}")
    )
    with output_of(args.output) as out:
        print(text, file=out)
    return BITS_DIFFER if divergence.is_found else OK


def _positional(args: argparse.Namespace, given: Sequence[str]) -> tuple[str | None, str]:
    """A and B of the settings without a name."""
    settings = args.settings
    if args.a is not None or args.b:
        raise InputError(f"{settings[0]!r} stands for --a or --b, and those are given too")
    if given == ["evidence"]:
        raise InputError(f"--evidence has its own settings; leave {settings[0]!r} out")
    if given and len(settings) == 1:
        return None, settings[0]
    if given or len(settings) != 2:
        wanted = f"one beside --{given[0]}" if given else "two, such as tp=1 tp=2"
        raise InputError(f"number of settings given: {len(settings)}; give {wanted}")
    return settings[0], settings[1]


def _of_settings(args: argparse.Namespace, b: Setting) -> "Divergence":
    """Return two settings, or an answer and a setting."""
    a: Setting | RecordedAnswer
    if args.answer is not None:
        with bad_input(f"--answer {args.answer}: "):
            a = RecordedAnswer.from_line(_line(args.answer, args.line))
    else:
        if args.prompt is None:
            raise InputError(
                "there is no prompt; give --prompt TEXT, --answer FILE, --receipt FILE or "
                "--evidence FILE"
            )
        with bad_input("--a: "):
            a = Setting.parse(args.a or "")
    with bad_input(rephrase=partial(in_flags, options=_SAMPLING)):
        sampling = SamplingParams(**{its.name: getattr(args, its.name) for its in _SAMPLING})
    return _find(args, a, b, sampling)


def _of_receipt(args: argparse.Namespace, b: Setting) -> "Divergence":
    """The answer of a receipt, and a setting."""
    with bad_input(f"--receipt {args.receipt}: "):
        line = _line(args.receipt, args.line)

    from detjax.diverge.evidence import answer_of_receipt
    from detjax.proof.receipt import Receipt

    with bad_input(f"--receipt {args.receipt}: "):
        receipt = Receipt.from_json(line)
        answer = answer_of_receipt(receipt)
    if b.backend == "auto":
        b = dataclasses.replace(b, backend=receipt.build["backend"])
    sampling = dataclasses.replace(receipt.sampling, stop=(), logprobs=0)
    return _find(args, answer, b, sampling, receipt=receipt)


def _of_evidence(args: argparse.Namespace) -> "Divergence":
    """What a self-check has found."""
    path = Path(args.evidence).expanduser()
    with bad_input(f"--evidence {args.evidence}: "), path.open("rb"):
        pass  # before JAX is imported

    import jax

    from detjax.diverge.evidence import Evidence, reproduction_of
    from detjax.models.hf_config import load_config
    from detjax.models.hub import find_model
    from detjax.numerics import Build
    from detjax.pallas_kernels.backend import Backend

    with bad_input(f"--evidence {args.evidence}: "):
        evidence = Evidence.read(path)
        if args.model is None and not evidence.folder:
            raise ValueError("its weights were random, so there is no model; give --model")
        args.model = args.model or evidence.folder
        folder = find_model(args.model, revision=args.revision)
        reproduction = reproduction_of(
            evidence.difference, profile=evidence.profile,
            vocab_size=load_config(folder).vocab_size, dp=evidence.mesh[0], tp=evidence.mesh[1],
        )  # fmt: skip
    a, b = (
        dataclasses.replace(setting, backend=evidence.backend)
        for setting in (reproduction.a, reproduction.b)
    )
    args.prompt = reproduction.prompt
    found = _find(args, a, b, reproduction.sampling, profile=evidence.profile)
    devices = jax.devices(Backend(evidence.backend).platform)
    notes = evidence.notes(Build.current(evidence.backend, devices[0]), is_found=found.is_found)
    return dataclasses.replace(found, notes=(*found.notes, *notes))


def _line(path: str, number: int | None) -> str:
    """The line that is meant of a file with one or several."""
    text = Path(path).expanduser().read_text(encoding="utf-8")
    # WHY: JSON may hold U+2028 and others as they are, at which `splitlines` divides too.
    lines = [line for line in text.split("\n") if line.strip()]
    if len(lines) != 1 and number is None:
        raise ValueError(f"it has {len(lines)} answers; choose one with --line N")
    number = number or 1
    if not 1 <= number <= len(lines):
        raise ValueError(f"--line {number} must be from 1 to {len(lines)}")
    return lines[number - 1]


def _find(
    args: argparse.Namespace,
    a: Setting | RecordedAnswer,
    b: Setting,
    sampling: SamplingParams,
    *,
    receipt: "Receipt | None" = None,
    profile: "NumericsProfile | None" = None,
) -> "Divergence":
    """Load what the settings need, and compare."""
    import jax

    from detjax.cli.model import keep_compiled_programs
    from detjax.cli.receipts import find_model_of
    from detjax.diverge.find import find_divergence
    from detjax.models.hf_config import load_config
    from detjax.models.hub import find_model
    from detjax.models.loading import LoadedModel
    from detjax.models.quantization.scheme import weights_option
    from detjax.models.tokenizer import Tokenizer
    from detjax.numerics import NumericsProfile
    from detjax.opening import load_on_devices
    from detjax.parallel.gpu_memory import claim_gpu_memory
    from detjax.parallel.mesh import configure_virtual_devices
    from detjax.proof.identity import Identifier

    keep_compiled_programs(args.cache_dir)
    settings = [b] if isinstance(a, RecordedAnswer) else [a, b]
    name = args.model or BUNDLED_NAME
    cast_weights, quantized_weights = args.cast_weights, "auto"
    if receipt is not None:
        quantized_weights = weights_option(receipt.model["quantization"])
        profile = NumericsProfile(**receipt.numerics["profile"])
        cast_weights = receipt.model["weight_cast"].rpartition(" to ")[2]
    profile = profile or NumericsProfile.of(args.dtype, args.kv_cache_dtype)
    with bad_input("--model: "):
        if receipt is None:
            folder = find_model(name, revision=args.revision)
        else:
            folder, name = find_model_of(receipt, model=args.model, revision=args.revision)
        tokenizer = Tokenizer.from_folder(folder)

    def load(setting: Setting) -> LoadedModel:
        model, _ = load_on_devices(
            folder, profile=profile, backend=setting.backend, dp=setting.dp, tp=setting.tp,
            cast_weights=cast_weights, quantized_weights=quantized_weights,
        )  # fmt: skip
        if receipt is not None:
            _check_weights(receipt, Identifier(model, tokenizer, name=name).weights())
        return model

    with bad_input():
        # JAX makes its virtual devices once, when it starts: as many as the larger mesh needs.
        configure_virtual_devices(max(setting.dp * setting.tp for setting in settings))
        claim_gpu_memory()
        jax.devices()
        prompt = a.prompt_token_ids if isinstance(a, RecordedAnswer) else args.prompt
        prompt = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        room = _room(prompt, load_config(folder))
        sampling = dataclasses.replace(sampling, max_tokens=min(sampling.max_tokens, room))
        return find_divergence(load, prompt, a, b, sampling=sampling, is_deep=args.deep)


def _room(prompt: Sequence[int], config: "ModelConfig") -> int:
    """Tokens that the context has left after a prompt.

    Raises:
        ValueError: If it leaves no room, or has no tokens or unknown ones.
    """
    from detjax.engine.requests.checks import RequestLimits

    limits = RequestLimits.of(config, config.max_position_embeddings)
    limits.check_prompt(prompt, "the prompt", num_wanted=1)
    return limits.max_len - len(prompt)


def _check_weights(receipt: "Receipt", weights: str | None) -> None:
    """Refuse a receipt of other weights than those that were loaded."""
    if weights != receipt.model["weights"]:
        raise ValueError(
            f"the receipt is of another model: model.weights is {receipt.model['weights']} "
            f"there and {weights} here; give the right one with --model"
        )


if __name__ == "__main__":
    sys.exit(main())
