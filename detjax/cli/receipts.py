# SPDX-License-Identifier: Apache-2.0
"""Receipts written by the command, and what `detjax.replay` and `detjax.audit` share.

JAX is imported only once the receipts are known to be whole.
"""

import argparse
import difflib
import json
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich.console
import rich.progress

from detjax.cli import options
from detjax.cli.arguments import GenerateArgs
from detjax.cli.command_line import CommandParser, check_counts, check_file, check_model_option
from detjax.cli.display import MAX_LINES
from detjax.cli.errors import BITS_DIFFER, EXIT_CODES, OK, bad_input, one_line
from detjax.cli.model import keep_compiled_programs
from detjax.cli.options import Option, add_options, in_flags
from detjax.defaults import MAX_LORA_RANK
from detjax.engine.outputs.completion import CompletionOutput
from detjax.escaping import escaped
from detjax.pallas_kernels.backend import Backend
from detjax.proof.canonical_json import canonical_json
from detjax.proof.signing import SigningKey, read_public_key

if TYPE_CHECKING:  # imports JAX
    from detjax.llm import LLM
    from detjax.models.adapters.low_rank import Adapter
    from detjax.models.config import ModelConfig
    from detjax.numerics import NumericsProfile
    from detjax.proof.identity import Identity
    from detjax.proof.receipt import Receipt
    from detjax.proof.rerun import ReceiptDifference


def check_can_sign(key: str | None) -> None:
    """See that the extra is installed and the key, if there is one, is good.

    Raises:
        ValueError: If the extra is missing, or the key is none.
        OSError: If the key cannot be read.
    """
    try:
        canonical_json({})
    except ImportError as error:
        raise ValueError(f"--receipts: {error}") from error
    if key is not None:
        check_signing_key(key)


def check_signing_key(key: str) -> None:
    """See that the file of --sign is a key.

    Raises:
        ValueError: If it is none, or the extra is missing.
        OSError: If it cannot be read.
    """
    try:
        SigningKey(Path(key))
    except OSError as error:
        raise OSError(f"--sign {key} cannot be read: {error.strerror}") from error
    except (ImportError, ValueError) as error:
        raise ValueError(f"--sign: {error}") from error


def write_receipts(
    args: GenerateArgs,
    identity: "Identity",
    outputs: Sequence[CompletionOutput],
    end_token_ids: Sequence[int],
) -> None:
    """Write a receipt of each completion, signed if asked for."""
    from detjax.proof.receipt import Receipt

    assert args.receipts is not None
    key = None if args.sign is None else SigningKey(Path(args.sign))
    with Path(args.receipts).open("w") as file:
        for output in outputs:
            receipt = Receipt.of(identity, output, end_token_ids=end_token_ids)
            file.write((receipt if key is None else receipt.signed(key)).to_json() + "\n")


_MODEL = replace(options.MODEL, default=None, default_text="the id in the receipts")
_REVISION = replace(options.REVISION, default_text="the revision in the receipts")
_LORA_MODULES = replace(
    options.LORA_MODULES,
    help="folder of each LoRA adapter of the receipts, under any name. Receipts name an adapter by "
    "its hash",
)
_BACKEND = replace(options.BACKEND, default_text="auto: the backend in the receipts")
_SIZES = options.TP, options.DP, options.BATCH_SIZE, options.PREFILL_CHUNK
_ACCEPT = Option(
    name="accept",
    default=(),
    metavar="FIELD",
    help="compare even if this field of the model, numerics or build differs, such as build.arch; "
    "may be given several times. Without it a difference is an error",
)
_TRUST = Option(
    name="trust",
    metavar="KEY",
    parse=Path,
    help="ed25519 public key, a PEM file, which must have signed every receipt",
)


def make_receipt_parser(
    verb: str, description: str, example: str, own: Sequence[Option]
) -> CommandParser:
    """The parser of a command that checks receipts.

    Args:
        verb: Of the command.
        description: Says what it does.
        example: A command that checks the receipts of `answers.jsonl`.
        own: Options that it alone has.
    """
    parser = CommandParser(
        verb,
        description=description,
        epilog="examples:\n"
        '  python -m detjax.generate -p "The old house" --temperature 1 --receipts answers.jsonl\n'
        f"  {example}\n\n{EXIT_CODES}",
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="receipts, one per line")
    add_options(parser, "model", (_MODEL, _REVISION, _LORA_MODULES))
    add_options(parser, "kernels", (_BACKEND,))
    schedule = (*_SIZES, options.CACHE_DIR, *own)
    add_options(parser, "batch, mesh and schedule (change no bit)", schedule)
    add_options(parser, "check", (_ACCEPT, _TRUST, options.REPORT, options.QUIET))
    return parser


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckPlan:
    """How receipts are checked.

    Attributes:
        engine_options: Fields of `EngineConfig`.
        order: In which receipts are asked, as indices.
        has_predictions: As `rerun` has it.
        checked_lens: As `rerun` has it.
        drawn: What was drawn to be checked, for the verdict; empty if everything is.
        not_checked: What is not, for the verdict; empty if everything is.
        results: A file of results, read and continued.
    """

    engine_options: Mapping[str, Any]
    order: Sequence[int]
    has_predictions: bool
    checked_lens: Sequence[int]
    drawn: str = ""
    not_checked: str = ""
    results: Path | None = None


def run_command(
    args: argparse.Namespace,
    *,
    what: str,
    plan: Callable[[Sequence["Receipt"], Sequence[int], Backend], CheckPlan],
) -> int:
    """Read the receipts, load their model, run them and tell; return the exit code.

    Args:
        args: Of `make_receipt_parser`.
        what: Such as "replayed".
        plan: Says how receipts are checked with a backend, given how many tokens each answer has
            to be checked: those of a copy are none.

    Raises:
        InputError: If something given cannot be done.
    """
    check_counts(args, _SIZES)
    # A receipt is a stranger's file, of which anything may be wrong.
    with bad_input(
        rephrase=partial(in_flags, options=_SIZES),
        kinds=(TypeError, ImportError, MemoryError, RecursionError),
    ):
        _check_given(args)
        _check_accepted(args.accept)
        from detjax.proof.positions import first_of_copies
        from detjax.proof.receipt import read_receipts

        receipts = read_receipts(args.file)
        _check_signers(receipts, args.trust)
        _check_one_model(receipts)
        backend = _backend_that_checks(receipts[0], _backend_of(args, receipts[0]))
        is_first = first_of_copies(receipts)
        lens = [len(r.token_ids) * is_it for r, is_it in zip(receipts, is_first, strict=True)]
        outcome = _run(args, receipts, lens, what, plan(receipts, lens, backend))
    if args.report is not None:
        args.report.write_text(json.dumps(outcome, indent=2) + "\n")
    return BITS_DIFFER if outcome["differences"] else OK


def _check_given(args: argparse.Namespace) -> None:
    """Refuse options and files that cannot be, before JAX is imported."""
    with args.file.open("rb"):
        pass
    if args.trust is not None:
        read_public_key(args.trust)
    if args.report is not None:
        check_file(options.REPORT.flag, args.report)
    if args.model is not None:
        check_model_option(args.model, args.revision)


def _check_accepted(paths: Sequence[str]) -> None:
    """See that what may differ is something that the model and the machine say of themselves."""
    for path in paths:
        section, _, name = path.partition(".")
        if section not in ("model", "numerics", "build") or not name:
            raise ValueError(
                f"--accept {path} is no field of model, numerics or build, such as build.arch; the "
                "request and the answer are what is checked"
            )


def _check_known(paths: Sequence[str], first: "Receipt", here: "Identity") -> None:
    """See that what may differ is a field of the receipts, or of this machine."""
    from detjax.proof.rerun import identity_fields

    known = identity_fields(first) | identity_fields(here)
    for path in paths:
        if path not in known:
            near = difflib.get_close_matches(path, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"--accept {path} is no field of these receipts{hint}")


def _check_signers(receipts: Sequence["Receipt"], trusted: Path | None) -> None:
    if trusted is None:
        return
    key = read_public_key(trusted)
    for number, receipt in enumerate(receipts, start=1):
        if receipt.signature is None:
            raise ValueError(f"receipt {number} is not signed, and --trust {trusted} asks for it")
        if receipt.signature.public_key != key:
            raise ValueError(
                f"receipt {number} is signed by another key, {receipt.signature.public_key}, than "
                f"that of --trust {trusted}, {key}"
            )


def _check_one_model(receipts: Sequence["Receipt"]) -> None:
    from detjax.proof.parsing import shown

    first = receipts[0]
    for number, receipt in enumerate(receipts[1:], start=2):
        for section in ("model", "numerics", "build"):
            one, other = getattr(first, section), getattr(receipt, section)
            for name in sorted(one.keys() | other.keys()):
                if one.get(name) != other.get(name):
                    raise ValueError(
                        f"receipts 1 and {number} were not made by the same: {section}.{name} is "
                        f"{shown(one.get(name))} and {shown(other.get(name))}; give them in two "
                        "files"
                    )


def _backend_of(args: argparse.Namespace, receipt: "Receipt") -> str:
    """The kernels that check: those of the receipt, or others that are asked for."""
    return receipt.build["backend"] if args.backend == options.AUTO else args.backend


def _backend_that_checks(receipt: "Receipt", asked: str) -> Backend:
    """The kernels that are asked for, which give the bits of those that made the receipt.

    Raises:
        ValueError: If they do not, or cannot run here.
    """
    from detjax.pallas_kernels.backend_choice import why_not_runnable

    made_by = receipt.build["backend"]
    names = [backend.value for backend in Backend]
    if made_by not in names:
        raise ValueError(
            f"the receipts were made by the kernels {made_by!r:.200}, and this detjax has "
            f"{', '.join(names)}"
        )
    backend = Backend(asked)
    if not backend.gives_bits_of(Backend(made_by)):
        raise ValueError(
            f"--backend {asked} does not give the bits of {made_by}, which made the receipts; "
            "leave it out"
        )
    if why := why_not_runnable(backend):
        alike = [b.value for b in Backend if b is not backend and b.gives_bits_of(backend)]
        others = f"; --backend {alike[0]} gives the same bits" if alike else ""
        raise ValueError(f"{asked}, which is to check the receipts, cannot run here: {why}{others}")
    return backend


def find_model_of(
    receipt: "Receipt", *, model: str | None, revision: str | None
) -> tuple[Path, str]:
    """The folder of a receipt's model, and its name as the receipt has it.

    A receipt is a stranger's file, which must not choose what is opened on this machine: it may
    name the bundled model and repositories, and no folder.

    Args:
        receipt: Says what the model is called.
        model: What the user says, which may be a folder; None takes the receipt's name.
        revision: What the user says; None takes the receipt's commit with its name.

    Raises:
        ValueError: If the receipt names a folder, and `model` is None.
        FileNotFoundError, PermissionError: As `find_model` says.
    """
    from detjax.models.bundled import BUNDLED, BUNDLED_NAME
    from detjax.models.hub import find_model

    if model is not None:
        return find_model(model, revision=revision), model
    name = receipt.model["name"]
    if name in (BUNDLED, BUNDLED_NAME):
        return find_model(BUNDLED, revision=revision), name
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name, re.ASCII) or Path(name).exists():
        raise ValueError(
            f"the receipts name {name!r:.200}, a folder; a receipt does not choose what is "
            "opened on this machine, so give the folder or id of the model with --model"
        )
    return find_model(name, revision=revision or receipt.model["hub_commit"]), name


def _run(
    args: argparse.Namespace,
    receipts: Sequence["Receipt"],
    answer_lens: Sequence[int],
    what: str,
    plan: CheckPlan,
) -> dict[str, Any]:
    """Load the model, run the receipts and tell; return the report. Copies have length 0."""
    from detjax.proof.identity import Identifier
    from detjax.proof.rerun import is_of_build

    keep_compiled_programs(args.cache_dir)
    console = rich.console.Console(stderr=True, quiet=args.quiet)
    first = receipts[0]
    folder, name = find_model_of(first, model=args.model, revision=args.revision)
    begin_s = time.perf_counter()
    llm = _open(args, receipts, folder, plan.engine_options)
    here = Identifier(llm.model, llm.tokenizer, name=name).identity()
    unlike, excused = _compare_identity(args, first, here)
    for path, said, now in unlike:
        is_told = is_of_build(path) and path not in args.accept
        why = "another build" if is_told else "accepted"
        _note(console, f"{why}: {path} is {said} in the receipts and {now} here")
    loaded_s = time.perf_counter() - begin_s
    order = [i for i in plan.order if answer_lens[i]]
    plan = replace(plan, order=order)
    differences, run_s = _rerun(llm, receipts, here, console, plan, what=what, excused=excused)
    stats = llm.engine.stats()
    run_s -= stats.compile_s
    not_checked = [plan.not_checked] if plan.not_checked else []
    report = {
        "what": what,
        "num_receipts": sum(n > 0 for n in answer_lens),
        "num_tokens": sum(answer_lens),
        "num_copies": answer_lens.count(0),
        "num_checked_receipts": sum(n > 0 for n in plan.checked_lens),
        "num_checked_tokens": sum(map(min, plan.checked_lens, answer_lens)),
        "drawn": plan.drawn,
        "differences": [
            {"receipt": d.index + 1, "field": d.field, "said": d.receipt, "here": d.here}
            for d in differences
        ],
        "model": here.model | {"folder": str(folder)},
        "bits": {"receipts": first.bits, "here": here.bits},
        "not_proven": not_checked + _unproven(receipts, args.trust, unlike),
        "accepted": [path for path, _, _ in unlike],
        "unlike": {path: {"receipts": said, "here": now} for path, said, now in unlike},
        "tp": args.tp,
        "dp": args.dp,
        "batch_size": llm.config.engine.batch_size,
        "load_s": loaded_s,
        "compile_s": stats.compile_s,
        "run_s": run_s,
        "num_windows": stats.num_windows,
        "num_rollbacks": stats.num_rollbacks,
    }
    _tell(report, differences, console)
    return report


def _rerun(
    llm: "LLM",
    receipts: Sequence["Receipt"],
    here: "Identity",
    console: rich.console.Console,
    plan: CheckPlan,
    *,
    what: str,
    excused: Sequence[str],
) -> tuple[list["ReceiptDifference"], float]:
    """Run the receipts under a bar; what differs, and the seconds that it took."""
    from detjax.proof.kept_results import KeptResults
    from detjax.proof.rerun import RerunListener, rerun

    facts = {
        "bits": here.bits, "source": here.build["source"], "excused": sorted(excused),
        "tokenizer": here.model["tokenizer"],
        "end_token_ids": sorted(llm.config.model.eos_token_ids),
    }  # fmt: skip
    kept = KeptResults(plan.results, facts)
    done = kept.done(receipts, plan.checked_lens)
    lens = [0 if i in done else n for i, n in enumerate(plan.checked_lens)]
    if done:
        _note(console, f"{len(done)} receipts are done already, in {plan.results}")
    if plan.has_predictions and llm.model.backend.platform == "cpu":
        _tell_estimate(llm, receipts, lens, console)
    with rich.progress.Progress(
        console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(f"{what} tokens", total=sum(lens))
        begin_s = time.perf_counter()
        differences = rerun(
            llm.engine,
            llm.tokenizer,
            receipts,
            identity=here,
            config=llm.config.model,
            has_predictions=plan.has_predictions,
            excused=excused,
            order=[i for i in plan.order if i not in done],
            checked_lens=lens,
            listener=RerunListener(
                on_tokens=lambda num_tokens: bar.update(task, completed=num_tokens),
                on_receipt=lambda i, difference: kept.keep(receipts[i], lens[i], difference),
            ),
        )
        run_s = time.perf_counter() - begin_s
    differences += [difference for difference in done.values() if difference is not None]
    return sorted(differences, key=lambda difference: difference.index), run_s


def _tell_estimate(
    llm: "LLM",
    receipts: Sequence["Receipt"],
    lens: Sequence[int],
    console: rich.console.Console,
) -> None:
    """Say how long the receipts that are left will take on this CPU."""
    from detjax.proof.cost import estimate_audit

    engine = llm.config.engine
    pairs = zip(receipts, lens, strict=True)
    lengths = [(len(receipt.prompt_token_ids), n) for receipt, n in pairs if n]
    if lengths:
        estimate = estimate_audit(
            llm.config.model, lengths,
            chunk=engine.prefill_chunk, window=engine.verify_window, backend=llm.model.backend,
        )  # fmt: skip
        _note(console, str(estimate))


def _note(console: rich.console.Console, text: str, *, style: str = "") -> None:
    """Write a line, without control characters."""
    console.print(escaped(text), style=style, highlight=False, markup=False, soft_wrap=True)


def _verdict(report: Mapping[str, Any], num_different: int) -> Iterator[str]:
    """Lines for standard output."""
    model, counts = report["model"], [report["num_receipts"], report["num_tokens"]]
    if report["drawn"]:
        checked = report["num_checked_receipts"], report["num_checked_tokens"]
        counts = [f"{some} of {all_of}" for some, all_of in zip(checked, counts, strict=True)]
    yield (
        f"{report['what']} {counts[0]} receipts, {counts[1]} tokens and logprobs: "
        f"{num_different} receipts differ"
    )
    if num_copies := report["num_copies"]:
        yield f"copies: {num_copies} lines are copies of others, and are not counted"
    if report["drawn"]:
        yield f"drawn: {report['drawn']}"
    yield f"model: weights {model['weights']}, found at {model['folder']}"
    said, here = report["bits"]["receipts"], report["bits"]["here"]
    yield f"bits: {here}" if said == here else f"bits: {said} in the receipts and {here} here"
    yield f"not proven: {'; '.join(report['not_proven'])}"


def _tell(
    report: Mapping[str, Any],
    differences: Sequence["ReceiptDifference"],
    console: rich.console.Console,
) -> None:
    """Write the verdict to standard output, and what differs and the times to standard error."""
    loud = rich.console.Console(stderr=True)
    lines = [str(difference) for difference in differences[:MAX_LINES]]
    if len(differences) > MAX_LINES:
        lines.append(f"and {len(differences) - MAX_LINES} more")
    style = "bold red" if differences else "bold green"
    for line in lines:
        _note(loud, one_line(line), style=style)
    for line in _verdict(report, len(differences)):
        print(escaped(line))
    _note(
        console,
        f"{report['what']} with tp {report['tp']}, dp {report['dp']}, batch "
        f"{report['batch_size']}: load {report['load_s']:.1f} s, compile "
        f"{report['compile_s']:.1f} s, run {report['run_s']:.2f} s",
        style=style,
    )


def _open(
    args: argparse.Namespace,
    receipts: Sequence["Receipt"],
    folder: Path,
    asked: Mapping[str, Any],
) -> "LLM":
    """The model, with the numerics that the receipts name and room for their answers."""
    from detjax.llm import LLM
    from detjax.models.hf_config import load_config
    from detjax.models.quantization.scheme import weights_option
    from detjax.numerics import NumericsProfile

    names = "batch_size", "prefill_chunk"
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    first, modules = receipts[0], options.read_lora_modules(args.lora_modules)
    profile, config = NumericsProfile(**first.numerics["profile"]), load_config(folder)
    adapters = _read_adapters(modules.values(), config, profile)
    llm = LLM(
        folder,
        backend=_backend_of(args, first),
        tp=args.tp,
        dp=args.dp,
        profile=profile,
        cast_weights=_cast_option(first.model["weight_cast"]),
        quantized_weights=weights_option(first.model["quantization"]),
        max_len=_max_len(receipts, config.max_position_embeddings),
        cache_dir=None,
        show_progress=not args.quiet,
        enable_lora=bool(adapters),
        max_lora_rank=max([MAX_LORA_RANK, *(one.rank for one in adapters)]),
        max_expert_lora_rank=max((one.expert_rank for one in adapters), default=0),
        **{"batch_size": None, "prefill_chunk": None, **asked, **given},
    )
    for adapter in adapters:
        llm.engine.add_adapter(adapter)
    _check_adapters(receipts, {adapter.sha256 for adapter in adapters})
    return llm


def _read_adapters(
    folders: Collection[Path], config: "ModelConfig", profile: "NumericsProfile"
) -> list["Adapter"]:
    """The adapters of folders, of any rank."""
    from detjax.models.adapters.adapter import read_adapter
    from detjax.models.adapters.limits import MAX_RANK

    options = {"dtype": profile.param_dtype, "max_rank": MAX_RANK, "max_expert_rank": MAX_RANK}
    return [read_adapter(folder, config, **options) for folder in folders]


def _check_adapters(receipts: Sequence["Receipt"], loaded: Collection[str]) -> None:
    """See that the adapters of receipts are among these hashes."""
    for number, receipt in enumerate(receipts, start=1):
        if receipt.adapter and receipt.adapter not in loaded:
            raise ValueError(
                f"receipt {number} was made with the adapter {receipt.adapter}, and --lora-modules "
                f"has {', '.join(sorted(loaded)) or 'none'}; give its folder as NAME=DIR"
            )


def _compare_identity(
    args: argparse.Namespace, first: "Receipt", here: "Identity"
) -> tuple[list[tuple[str, str, str]], tuple[str, ...]]:
    """What differs of model, numerics and build, all of which may; and all that may.

    Raises:
        ValueError: If something differs that must not.
    """
    from detjax.proof.rerun import (
        ALWAYS_EXCUSED,
        OF_ANOTHER_NAME,
        identity_differences,
        is_of_build,
    )

    named = OF_ANOTHER_NAME if args.model is not None else ()
    unlike = list(identity_differences(first, here))
    _check_known(args.accept, first, here)
    # The fingerprint follows from the build, so alone it does not differ.
    may_differ = first.bits == here.bits and any(
        path.startswith("build.") and path not in ALWAYS_EXCUSED for path, _, _ in unlike
    )
    builds = [path for path, _, _ in unlike if may_differ and is_of_build(path)]
    excused = (*args.accept, *ALWAYS_EXCUSED, *builds, *named)
    refused = [found for found in unlike if found[0] not in excused]
    if refused:
        lines = "; ".join(
            f"{path} is {said} in the receipts and {now} here" for path, said, now in refused
        )
        accepted = " ".join(f"--accept {path}" for path, _, _ in refused)
        raise ValueError(
            f"these receipts are of another model or build: {lines}. Use what they name (--model "
            f"chooses the model), or compare all the same with {accepted}"
        )
    return unlike, excused


def _unproven(
    receipts: Sequence["Receipt"], trusted: Path | None, unlike: Sequence[tuple[str, str, str]]
) -> list[str]:
    """What receipts do not prove, in words."""
    keys = {None if r.signature is None else r.signature.public_key for r in receipts}
    who = [] if trusted is not None else [
        "who made it (not signed)" if key is None else f"whose key {key} is"
        for key in sorted(keys, key=str)
    ]  # fmt: skip
    from detjax.proof.rerun import is_of_build

    # What was told of builds is long, and stands above.
    builds = [path for path, *_ in unlike if is_of_build(path)]
    build = [f"the build, whose {', '.join(builds)} differ here"] if builds else []
    fields = [
        f"{path} ({said} in the receipts, {now} here)"
        for path, said, now in unlike
        if path not in builds
    ]
    return ["when it was made", *who, *build, *fields]


def _cast_option(weight_cast: str) -> str:
    """The option that asks for a cast such as "float16 to bfloat16"."""
    cast = weight_cast.rpartition(" to ")[2]
    if cast not in options.CAST_WEIGHTS.choices:
        raise ValueError(
            f"model.weight_cast of the receipts is {weight_cast!r:.200}, which ends with "
            f"none of {', '.join(options.CAST_WEIGHTS.choices)}"
        )
    return cast


def _max_len(receipts: Sequence["Receipt"], context: int) -> int:
    """Room for the longest prompt and answer, rounded up so that programs are shared.

    Raises:
        ValueError: If one has more tokens than the model's context.
    """
    lengths = [len(r.prompt_token_ids) + len(r.token_ids) for r in receipts]
    longest = max(lengths)
    if longest > context:
        raise ValueError(
            f"receipt {lengths.index(longest) + 1} has {longest} tokens, more than the model's "
            f"context of {context}"
        )
    return min(context, max(256, 1 << longest.bit_length()))
