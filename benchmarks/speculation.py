# SPDX-License-Identifier: Apache-2.0
r"""Tokens a second with each source of drafts and without, in turn, and whether a bit differs.

python -m benchmarks.speculation --out speculation.jsonl
python -m benchmarks.speculation --model FOLDER_OR_ID --draft FOLDER_OR_ID --prompts-file FILE.txt
python -m benchmarks.speculation --model FOLDER_OR_ID --head FOLDER_OR_ID --prompts-file FILE.txt
python -m benchmarks.speculation --shapes tiny --backend portable --layers 1 --tokens 16
python -m benchmarks.speculation --replay 0.74 --drafts 4
python -m benchmarks.speculation --replay 0.74 --drafts 4 --weights int8-w8a8 --head-weights int8
python -m benchmarks.speculation --model FOLDER_OR_ID --head FOLDER_OR_ID --prompts-file FILE.txt \
    --mode invariant dvr --temperature 0 0.8 --batch 32 --requests 256 --control

Without `--model` the weights are random, and no layer of the model but the first `--layers` adds to
the residual stream. The draft model is these layers, so it agrees with the model as a good draft
model would, at the cost of a small one. `--noise` makes it worse: it is added to the draft model's
last matrix, in units of the matrix's own deviation. Each batch and source answers the same
requests, greedy and sampled. In `dvr` fast steps of the model itself draft as well.

`--control` also lets the last source of a mode commit its drafts unseen, as an engine does that
accepts by the logits of the drafts. Its answers must differ.

`--replay` times an EAGLE-3 head of these shapes, with a draft vocabulary of 32000. Its weights are
zeros, and each draft is replaced by the token of the answer, or by another one: it is right with
this probability. All requests are greedy and begin in one text, `--stagger` tokens apart: without
it all rows of a batch accept the same drafts. Exits with 3 if a bit differs.
"""

import argparse
import contextlib
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")

from benchmarks.common import Rows, environment
from benchmarks.step import MODELS as SHAPES

# isort: split
import jax
import jax.numpy as jnp
import numpy as np

from detjax.defaults import EAGLE3, HEAD_QUANTIZATIONS
from detjax.engine.config import DRAFT_MODEL, MODES, OWN_DRAFT_WEIGHTS, EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.metrics import DraftCounts
from detjax.engine.outputs.completion import Completion
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.running import programs as programs_module
from detjax.engine.running.programs import Candidates, keep_candidates
from detjax.engine.scheduling.drafters import HOST_DRAFTERS
from detjax.engine.speculative_config import SpeculativeConfig
from detjax.models.heads.eagle import load_eagle_head, place_eagle_head, tensor_shapes
from detjax.models.heads.head import AnyDraftModel, DraftHead
from detjax.models.heads.quantize import quantize_head
from detjax.models.hub import find_model
from detjax.models.loading import LoadedModel, random_model
from detjax.models.quantization.quantize import RECIPES
from detjax.models.tokenizer import Tokenizer
from detjax.numerics import NumericsProfile
from detjax.opening import load_draft_model, load_on_devices
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh
from detjax.testing.eagle import dummy_eagle, dummy_ids
from detjax.testing.quantized import quantized_model

HOST_DRAFTS = "ngram", "suffix"

_ADDS = {"o", "o_bias", "down", "expert_down"}
"""Weights of a layer whose products are added to the residual stream."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """What is measured: a model, its draft models and heads by name, and prompts."""

    model: LoadedModel
    drafts: dict[str, AnyDraftModel]
    prompts: list[tuple[int, ...]]


def first_layers(model: LoadedModel, count: int, noise: float) -> LoadedModel:
    """A model of the first layers of another, with noise in its last matrix."""
    params = {**model.params, "layers": model.params["layers"][:count]}
    if noise:
        head = params["lm_head"]
        drawn = jax.random.normal(jax.random.key(1), head.shape, jnp.float32)
        scale = noise * jnp.std(head.astype(jnp.float32))
        noisy = (head.astype(jnp.float32) + scale * drawn).astype(head.dtype)
        params["lm_head"] = jax.device_put(noisy, head.sharding)
    specs = {**model.partition_specs, "layers": model.partition_specs["layers"][:count]}
    config = model.config.with_layers(range(count))
    return dataclasses.replace(model, config=config, params=params, partition_specs=specs)


def random_subject(args: argparse.Namespace, backend: Backend) -> Subject:
    """A model of random weights whose later layers add nothing, and its first layers."""
    config = dataclasses.replace(SHAPES[args.shapes], max_position_embeddings=args.max_len)
    model = random_model(
        config, seed=0, profile=NumericsProfile(),
        mesh=make_mesh(1, 1, platform=backend.platform), backend=backend,
    )  # fmt: skip
    for layer in model.params["layers"][args.layers :]:
        for name in _ADDS & layer.keys():
            layer[name] = jnp.zeros_like(layer[name])
    drafts: dict[str, AnyDraftModel] = {
        f"noise {noise:g}": first_layers(model, args.layers, noise) for noise in args.noise
    }
    if args.replay is not None:
        if args.weights != "bfloat16":
            model = quantized_model(model, args.weights)
        drafts = {"replayed": replaying_head(model, args.head_weights)}
    return Subject(model=model, drafts=drafts, prompts=random_prompts(args, config.vocab_size))


def random_prompts(args: argparse.Namespace, vocab_size: int) -> list[tuple[int, ...]]:
    """As many as are asked at most."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, vocab_size, (max(args.requests, *args.batch), args.prompt))
    return [tuple(ids) for ids in drawn.tolist()]


def loaded_subject(args: argparse.Namespace) -> Subject:
    """A model, its draft model and its head from folders, and texts."""
    folder = find_model(args.model)
    model, _ = load_on_devices(
        folder, profile=NumericsProfile(), backend=args.backend, dp=1, tp=1, max_len=args.max_len,
        quantized_weights=args.quantized,
    )  # fmt: skip
    if args.replay is not None:
        return Subject(
            model=model, drafts={"replayed": replaying_head(model, args.head_weights)},
            prompts=random_prompts(args, model.config.vocab_size),
        )  # fmt: skip
    tokenizer = Tokenizer.from_folder(folder)
    drafts: dict[str, AnyDraftModel] = {}
    if args.draft is not None:
        drafts[args.draft] = load_draft_model(args.draft, model=model, tokenizer=tokenizer)
    if args.head is not None:
        drafts[args.head] = with_weights(load_eagle_head(args.head, model=model), args.head_weights)
    texts = [line for line in args.prompts_file.read_text().splitlines() if line.strip()]
    texts = [texts[i % len(texts)] for i in range(max(args.requests, *args.batch))]
    prompts = [tuple(tokenizer.encode(text)) for text in texts]
    if args.chat:
        turns = ([{"role": "user", "content": text}] for text in texts)
        prompts = [tuple(tokenizer.apply_chat_template(turn)) for turn in turns]
    return Subject(model=model, drafts=drafts, prompts=prompts)


def requests_of(
    subject: Subject, args: argparse.Namespace, count: int, temperature: float | None
) -> list[Request]:
    """As many requests at a temperature; None: every other one is greedy, and the rest at 1."""

    def sampling(i: int) -> SamplingParams:
        heat = float(i % 2) if temperature is None else temperature
        seed = i if heat else None
        return SamplingParams(max_tokens=args.tokens, temperature=heat, seed=seed)

    return [
        Request(prompt_token_ids=prompt, sampling=sampling(i))
        for i, prompt in enumerate(subject.prompts[:count])
    ]


def make_engine(
    subject: Subject,
    args: argparse.Namespace,
    batch: int,
    method: str,
    draft: AnyDraftModel | None,
    candidates: Candidates = keep_candidates,
    mode: str = "invariant",
) -> Engine:
    """An engine whose drafts come from one source, or that makes none."""
    # Who drafts on the host looks at every token before the next.
    steps = 1 if method in HOST_DRAFTS or mode == "dvr" else args.decode_steps
    options: dict[str, Any] = {"mode": mode, "decode_steps": steps}
    drafters = HOST_DRAFTERS
    if method in OWN_DRAFT_WEIGHTS:
        options |= {
            "draft_weights": method, "verify_window": args.drafts + 1, "verify_rows": batch,
            "max_draft_fraction": 1.0,
        }  # fmt: skip
    elif method != "none":
        speculative = SpeculativeConfig(
            method=method,
            model="given" if draft is not None else "",
            num_speculative_tokens=args.drafts,
            disable_by_batch_size=batch,
            is_adaptive=args.adaptive,
        )
        options |= speculative.engine_options()
        drafters = speculative.drafters()
    # Pages for its sequences alone: the engine without drafts stays beside it.
    pages = batch * -(-args.max_len // subject.model.profile.attention_block)
    config = EngineConfig(
        batch_size=batch, prefill_chunk=min(512, args.max_len), max_len=args.max_len,
        num_pages=pages, self_check="off", **options,
    )  # fmt: skip
    return Engine(
        subject.model, config, candidates=candidates, drafters=drafters, draft_model=draft
    )


def with_weights(head: DraftHead, weights: str) -> DraftHead:
    """A head whose matrices are as `--head-weights` has them."""
    if weights != "bfloat16":
        quantize_head(head, weights)
    return head


def replaying_head(model: LoadedModel, weights: str) -> DraftHead:
    """A head of a model's shapes whose drafts nobody looks at."""
    eagle = dummy_eagle(model.config, draft_vocab_size=min(32000, model.config.vocab_size))
    num_layers = model.config.num_layers
    layers = 1, max(1, num_layers // 2), num_layers - 1
    eagle = dataclasses.replace(eagle, feature_layers=layers)
    tensors = {name: np.zeros(shape, np.float32) for name, shape in tensor_shapes(eagle).items()}
    return with_weights(place_eagle_head(eagle, tensors, dummy_ids(eagle), model=model), weights)


def replayed(known: Sequence[int], *, share: float, vocab_size: int) -> Candidates:
    """Drafts of a known text, each right with a probability."""
    text = np.array(known, np.int32)
    is_right = np.random.default_rng(1).random(len(text)) < share
    drafts = jnp.asarray(np.where(is_right, text, (text + 1) % vocab_size))

    def candidates(token_ids, positions):
        return drafts[jnp.clip(positions, 0, len(text) - 1)]

    return candidates


def measure_replay(subject: Subject, args: argparse.Namespace, batch: int, rows: Rows) -> bool:
    """Time a head whose acceptance is given; False if a bit differs."""
    prompt, model = subject.prompts[0], subject.model
    sampling = SamplingParams(max_tokens=args.tokens, temperature=0.0)
    plain = make_engine(subject, args, batch, "none", None)
    begins = [args.stagger * i for i in range(args.requests or batch)]
    whole = dataclasses.replace(sampling, max_tokens=begins[-1] + args.tokens)
    (answer,) = plain.generate([Request(prompt_token_ids=prompt, sampling=whole)])
    text = (*prompt, *answer.token_ids)
    asked = [
        Request(prompt_token_ids=text[: len(prompt) + begin], sampling=sampling) for begin in begins
    ]
    expected = warmed_up(plain, asked)
    candidates = replayed(text, share=args.replay, vocab_size=model.config.vocab_size)
    head = subject.drafts["replayed"]
    engine = make_engine(subject, args, batch, EAGLE3, head, candidates=candidates)
    answers = warmed_up(engine, asked)
    before = engine.stats().drafts[EAGLE3]
    base, rate = rates_in_turn((plain, engine), asked, args.rounds)
    counts = engine.stats().drafts[EAGLE3].since(before)
    different = num_different(answers, expected)
    rows.keep(
        subject="speculation", source=EAGLE3, draft="replayed", batch=batch, drafts=args.drafts,
        is_adaptive=args.adaptive, decode_steps=args.decode_steps,
        head_weights=args.head_weights, tokens_per_s=rate,
        none_tokens_per_s=base, ratio_to_none=rate / base, acceptance=counts.acceptance,
        tokens_per_window=counts.tokens_per_window, different=different, answers=len(asked),
        stagger=args.stagger,
    )  # fmt: skip
    return different == 0


type Source = tuple[str, str, AnyDraftModel | None]
"""How drafts are made: a method, the name of its model or head, and that itself."""


def sources_of(subject: Subject, mode: str) -> list[Source]:
    """What drafts in a mode."""
    own = HOST_DRAFTS if mode == "invariant" else OWN_DRAFT_WEIGHTS
    sources: list[Source] = [(name, "", None) for name in own]
    return sources + [
        (EAGLE3 if isinstance(draft, DraftHead) else DRAFT_MODEL, name, draft)
        for name, draft in subject.drafts.items()
    ]


def measure(subject: Subject, args: argparse.Namespace, batch: int, rows: Rows) -> bool:
    """Time every source on the same requests; False if a bit differs where none may."""
    heats = args.temperature or [None]
    asked = {heat: requests_of(subject, args, args.requests or batch, heat) for heat in heats}
    every = [request for some in asked.values() for request in some]
    plain = make_engine(subject, args, batch, "none", None)
    plain.compile(requests=every)
    expected = {heat: warmed_up(plain, some) for heat, some in asked.items()}
    results = []
    for mode in args.mode:
        sources = [
            (*source, False)
            for source in sources_of(subject, mode)
            if args.sources is None or source[0] in args.sources
        ]
        sources += [(*source[:3], True) for source in sources[-1:]] * args.control
        for method, name, draft, is_unseen in sources:
            with committing_unseen() if is_unseen else contextlib.nullcontext():
                engine = make_engine(subject, args, batch, method, draft, mode=mode)
                engine.compile(requests=every)
            for heat, some in asked.items():
                answers = warmed_up(engine, some)
                before = engine.stats().drafts.get(method, DraftCounts())
                base, rate = rates_in_turn((plain, engine), some, args.rounds)
                counts = engine.stats().drafts.get(method, DraftCounts()).since(before)
                different = num_different(answers, expected[heat])
                pairs = zip(answers, expected[heat], strict=True)
                rows.keep(
                    subject="speculation", batch=batch, is_adaptive=args.adaptive,
                    decode_steps=args.decode_steps, source=method, draft=name,
                    head_weights=args.head_weights if isinstance(draft, DraftHead) else "",
                    is_control=is_unseen, mode=mode, temperature=heat, drafts=args.drafts,
                    tokens_per_s=rate, none_tokens_per_s=base,
                    ratio_to_none=rate / max(base, 1e-9), acceptance=counts.acceptance,
                    tokens_per_window=counts.tokens_per_window,
                    different=different, answers=len(answers),
                    different_tokens=sum(one.token_ids != other.token_ids for one, other in pairs),
                    tokens=sum(len(a.token_ids) for a in answers),
                )  # fmt: skip
                results.append((different > 0) is is_unseen)
            del engine
    return all(results)


@contextlib.contextmanager
def committing_unseen() -> Iterator[None]:
    """Programs that are traced in here believe the drafts of a window."""
    checked = programs_module.commit_window

    def commit_drafts(slots, slot, start, drafts, num_drafts, chosen):
        believed = jnp.concatenate([drafts, chosen[:, -1:]], axis=1)
        return checked(slots, slot, start, drafts, num_drafts, believed)

    programs_module.commit_window = commit_drafts
    try:
        yield
    finally:
        programs_module.commit_window = checked


def warmed_up(engine: Engine, asked: Sequence[Request]) -> list[Completion]:
    """The answers of an engine, which has compiled and run everything then."""
    engine.compile(requests=asked)
    return engine.generate(asked)


def num_different(answers: Sequence[Completion], expected: Sequence[Completion]) -> int:
    """Answers with another bit than what was expected."""
    pairs = zip(answers, expected, strict=True)
    return sum(one.digest() != other.digest() for one, other in pairs)


def rates_in_turn(
    engines: tuple[Engine, Engine], asked: Sequence[Request], rounds: int
) -> tuple[float, float]:
    """The median rate of each of two engines, which answer in turn; 0 without rounds."""
    rates = [[rate_of(engine, asked) for engine in engines] for _ in range(rounds)]
    if not rates:
        return 0.0, 0.0
    base, rate = (statistics.median(of_engine) for of_engine in zip(*rates, strict=True))
    return base, rate


def rate_of(engine: Engine, asked: Sequence[Request]) -> float:
    """Tokens a second of all requests together, from the first step to the last."""
    engine.reset_prefix_cache()
    begin_s = time.perf_counter()
    answers = engine.generate(asked)
    return sum(len(done.token_ids) for done in answers) / (time.perf_counter() - begin_s)


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder or id; random weights of --shapes without one")
    parser.add_argument("--draft", help="with --model: the draft model")
    parser.add_argument("--head", help="with --model: an EAGLE-3 head")
    parser.add_argument("--prompts-file", type=Path, help="with --model: a text a line")
    parser.add_argument("--chat", action="store_true", help="each text is a turn of a user")
    parser.add_argument("--shapes", choices=SHAPES, default="llama3_8b")
    parser.add_argument(
        "--layers", type=int, default=2, help="of the draft model of random weights"
    )
    parser.add_argument(
        "--sources", nargs="+", help="of those that can draft, time these, as `method` names them",
        choices=[*HOST_DRAFTS, *OWN_DRAFT_WEIGHTS, DRAFT_MODEL, EAGLE3],
    )  # fmt: skip
    parser.add_argument("--noise", type=float, nargs="+", default=[0.0, 0.3, 1.0])
    parser.add_argument("--replay", type=float, help="how often a draft is right, from 0 to 1")
    parser.add_argument(
        "--weights", choices=["bfloat16", *RECIPES], default="bfloat16",
        help="with --replay and random weights: of the layers' matrices",
    )  # fmt: skip
    parser.add_argument(
        "--head-weights", choices=["bfloat16", *HEAD_QUANTIZATIONS], default="bfloat16",
        help="with --replay or --head: of the matrices of the head",
    )  # fmt: skip
    parser.add_argument("--backend", choices=[b.value for b in Backend], default="sm90")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument(
        "--stagger",
        type=int,
        default=0,
        help="with --replay: tokens by which a prompt is longer than the one before",
    )
    parser.add_argument(
        "--decode-steps",
        type=int,
        default=1,
        help="steps a launch, with a model's drafts and without any",
    )
    parser.add_argument("--drafts", type=int, default=3, help="tokens a window")
    parser.add_argument("--adaptive", action="store_true", help="fewer drafts where that is faster")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a random prompt")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--max-len", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--requests", type=int, default=0, help="answers of each source; 0: as many as run at once"
    )
    parser.add_argument("--mode", nargs="+", choices=MODES[:2], default=["invariant"])
    parser.add_argument(
        "--temperature", type=float, nargs="+", help="without it every other answer is sampled"
    )
    parser.add_argument("--control", action="store_true", help="and a source that must fail")
    parser.add_argument("--quantized", default="auto", help="with --model: quantized_weights")
    parser.add_argument("--out", help="write JSON rows here")
    return parser


def main() -> None:
    """Measure; exit 3 if a bit differs from that of no drafts."""
    parser = make_parser()
    args = parser.parse_args()
    has_drafts = args.replay is not None or (args.draft or args.head) and args.prompts_file
    if args.model is not None and not has_drafts:
        parser.error("--model needs --replay, or --prompts-file and --draft or --head")
    if args.weights != "bfloat16" and (args.replay is None or args.model is not None):
        parser.error("--weights needs --replay, and no --model")
    if args.head_weights != "bfloat16" and args.replay is None and args.head is None:
        parser.error("--head-weights needs --replay or --head")
    backend = Backend(args.backend)
    what = args.model or f"{args.shapes}, {args.layers} layers that add"
    what += f", {args.weights}" * (args.weights != "bfloat16")
    what += f", {args.quantized}" * (args.quantized != "auto")
    rows = Rows(environment(backend) | {"model": what, "backend": args.backend}, args.out)
    subject = loaded_subject(args) if args.model is not None else random_subject(args, backend)
    measured = measure if args.replay is None else measure_replay
    results = [measured(subject, args, batch, rows) for batch in args.batch]
    sys.exit(0 if all(results) else 3)


if __name__ == "__main__":
    main()
