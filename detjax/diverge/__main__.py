# SPDX-License-Identifier: Apache-2.0
"""`python -m detjax.diverge`: the first token, layer and operation whose bits differ.

JAX is imported only after the command line has been checked.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from detjax import __version__
from detjax.cli.arguments import GenerateArgs
from detjax.cli.errors import BAD_INPUT, BITS_DIFFER, OK, InputError, bad_input, one_line
from detjax.diverge.setting import RecordedAnswer, Setting
from detjax.engine.requests.request import SamplingParams
from detjax.models.bundled import BUNDLED_NAME
from detjax.models.hub import check_model

if TYPE_CHECKING:  # imports JAX
    from detjax.diverge.divergence import Divergence
    from detjax.numerics import NumericsProfile
    from detjax.proof.receipt import Receipt

EPILOG = """\
A setting is KEY=VALUE,KEY=VALUE of:
  tp=1            devices that share each layer; without GPUs, virtual ones
  dp=1            replicas
  batch=1         sequences that run at once: the prompt, and others of other tokens and lengths
  row=0           which of them is the prompt
  mode=invariant  or dvr, fast
  backend=auto    or portable, sm90
  chunk=64        prompt tokens of one prefill step
  path=decode     or prefill: each token is computed by a prefill of all before it
  decode_steps=1  tokens of a sequence in one launch
  pages=0         cache pages; 0 is enough for all, fewer mean preemption

examples:
  python -m detjax.diverge tp=1 tp=2,batch=8,chunk=16 --prompt "The sea"
  python -m detjax.diverge --prompt "The sea" --b "mode=fast"
  python -m detjax.generate --prompt "The sea" --format jsonl > answer.jsonl
  python -m detjax.diverge --answer answer.jsonl --b "batch=8,row=3"
  python -m detjax.diverge --receipt answers.jsonl --line 2 --b "tp=2"
  python -m detjax.diverge --evidence ~/.local/state/detjax/evidence/20261122T190000-7.json

exit codes: 0 no bit differs, 2 the input is wrong or cannot be done, 3 a bit differs
"""


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m detjax.diverge",
        description="Compare two settings, or an answer and a setting, of one model and prompt, "
        "and name the first operation whose bits differ.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"detjax {__version__}")
    parser.add_argument("settings", metavar="SETTING", nargs="*", help="A and B, in place of --a "
                        "and --b; with --answer or --receipt only B")  # fmt: skip
    parser.add_argument("--a", metavar="SETTING", help="one setting (default: all defaults)")
    parser.add_argument(
        "--b", metavar="SETTING", default="", help="the other setting (default: all defaults)"
    )
    parser.add_argument("--answer", metavar="FILE", help="an answer in place of --a and "
                        "--prompt, of detjax.generate --format jsonl with n=1")  # fmt: skip
    parser.add_argument("--receipt", metavar="FILE", help="a receipt in place of --a and "
                        "--prompt; its model, numerics and sampling are used")  # fmt: skip
    parser.add_argument("--evidence", metavar="FILE", help="the file of a failed self-check; "
                        "settings that repeat it are compared")  # fmt: skip
    parser.add_argument("--line", type=int, metavar="N", help="line of --answer or --receipt, "
                        "from 1; needed if there are several")  # fmt: skip
    parser.add_argument("--prompt", metavar="TEXT", help="what to continue")
    parser.add_argument("--deep", action="store_true",
                        help="compare every operation even if the answers are equal")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="write one JSON object")
    model = parser.add_argument_group("model")
    model.add_argument("--model", metavar="DIR_OR_ID",
                       help="a folder in Hugging Face format, or an id (default: that of the "
                       "receipt or the evidence, else the small model that comes with "
                       "detjax)")  # fmt: skip
    model.add_argument("--revision", help="branch, tag or commit of an id")
    model.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16",
                       help="of weights and compute; it chooses bits")  # fmt: skip
    model.add_argument("--cast-weights", choices=("none", "bfloat16"), default="none",
                       help="round a checkpoint of float16; it chooses bits")  # fmt: skip
    sampling = parser.add_argument_group("sampling (an answer has its own)")
    for name, kind in (
        ("max_tokens", int), ("temperature", float), ("top_k", int), ("top_p", float),
        ("min_p", float), ("seed", int),
    ):  # fmt: skip
        default = 16 if name == "max_tokens" else getattr(SamplingParams(), name)
        sampling.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default,
                              help=f"default: {default}")  # fmt: skip
    parser.add_argument("--cache-dir", default=GenerateArgs().cache_dir, metavar="DIR",
                        help="folder of compiled programs; none keeps none")  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    args = make_parser().parse_args(argv)
    try:
        return _run(args)
    except (InputError, FloatingPointError) as error:
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        return BAD_INPUT


def _run(args: argparse.Namespace) -> int:
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
        with bad_input("--model: "):
            check_model(args.model or BUNDLED_NAME, revision=args.revision)
    if given == ["evidence"]:
        divergence = _of_evidence(args)
    else:
        with bad_input("--b: "):
            b = Setting.parse(args.b)
        divergence = _of_receipt(args, b) if given == ["receipt"] else _of_settings(args, b)
    print(json.dumps(divergence.to_dict()) if args.json else divergence)
    return BITS_DIFFER if divergence.is_found else OK


def _positional(args: argparse.Namespace, given: Sequence[str]) -> tuple[str | None, str]:
    """Return A and B of the settings without a name."""
    settings = args.settings
    if args.a is not None or args.b:
        raise InputError(f"{settings[0]!r} stands for --a or --b, and those are given too")
    if given == ["evidence"]:
        raise InputError(f"--evidence has its own settings; leave {settings[0]!r} out")
    if given and len(settings) == 1:
        return None, settings[0]
    if given or len(settings) != 2:
        wanted = f"B beside --{given[0]}" if given else "A and B"
        raise InputError(f"{len(settings)} settings are given; give {wanted}")
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
    with bad_input():
        names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
        sampling = SamplingParams(**{name: getattr(args, name) for name in names})
    return _find(args, a, b, sampling)


def _of_receipt(args: argparse.Namespace, b: Setting) -> "Divergence":
    """Return the answer of a receipt, and a setting."""
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
    """Return the two settings of a self-check's finding."""
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
    """Return the chosen line of a file with one or several."""
    text = Path(path).expanduser().read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip()]
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
    from detjax.models.tokenizer import Tokenizer
    from detjax.numerics import NumericsProfile
    from detjax.opening import load_on_devices
    from detjax.parallel.mesh import configure_virtual_devices
    from detjax.proof.identity import Identifier

    keep_compiled_programs(args.cache_dir)
    settings = [b] if isinstance(a, RecordedAnswer) else [a, b]
    name = args.model or BUNDLED_NAME
    cast_weights = args.cast_weights
    if receipt is not None:
        profile = NumericsProfile(**receipt.numerics["profile"])
        cast_weights = receipt.model["weight_cast"].rpartition(" to ")[2]
    profile = profile or NumericsProfile(weight_dtype=args.dtype, compute_dtype=args.dtype)
    with bad_input("--model: "):
        if receipt is None:
            folder = find_model(name, revision=args.revision)
        else:
            folder, name = find_model_of(receipt, model=args.model, revision=args.revision)
        tokenizer = Tokenizer.from_folder(folder)

    def load(setting: Setting) -> LoadedModel:
        model, _ = load_on_devices(
            folder, profile=profile, backend=setting.backend, dp=setting.dp, tp=setting.tp,
            cast_weights=cast_weights,
        )  # fmt: skip
        if receipt is not None:
            _check_weights(receipt, Identifier(model, tokenizer, name=name).weights())
        return model

    with bad_input():
        # JAX makes its virtual devices once, when it starts: as many as the larger mesh needs.
        configure_virtual_devices(max(setting.dp * setting.tp for setting in settings))
        jax.devices()
        prompt = a.prompt_token_ids if isinstance(a, RecordedAnswer) else args.prompt
        prompt = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        room = _room(prompt, load_config(folder).max_position_embeddings)
        sampling = dataclasses.replace(sampling, max_tokens=min(sampling.max_tokens, room))
        return find_divergence(load, prompt, a, b, sampling=sampling, is_deep=args.deep)


def _room(prompt: Sequence[int], context: int) -> int:
    """Tokens that the context has left after a prompt."""
    if not prompt:
        raise InputError("--prompt has no tokens; give some text")
    if len(prompt) >= context:
        raise InputError(f"the prompt has {len(prompt)} tokens, and the context is {context}")
    return context - len(prompt)


def _check_weights(receipt: "Receipt", weights: str | None) -> None:
    """Refuse a receipt of other weights than those that were loaded."""
    if weights != receipt.model["weights"]:
        raise ValueError(
            f"the receipt is of another model: model.weights is {receipt.model['weights']} "
            f"there and {weights} here; give the right one with --model"
        )


if __name__ == "__main__":
    sys.exit(main())
