# SPDX-License-Identifier: Apache-2.0
"""Tokens a second without drafts and with each source of drafts, and whether a bit differs.

python -m benchmarks.speculation --out speculation.jsonl
python -m benchmarks.speculation --model FOLDER_OR_ID --draft FOLDER_OR_ID --prompts-file FILE.txt
python -m benchmarks.speculation --model FOLDER_OR_ID --head FOLDER_OR_ID --prompts-file FILE.txt
python -m benchmarks.speculation --shapes tiny --backend portable --layers 1 --tokens 16
python -m benchmarks.speculation --replay 0.74 --drafts 4

Without `--model` the weights are random, and no layer of the model but the first `--layers` adds to
the residual stream. The draft model is these layers, so it agrees with the model as a good draft
model would, at the cost of a small one. `--noise` makes it worse: it is added to the draft model's
last matrix, in units of the matrix's own deviation. Each batch and source answers the same
requests, greedy and sampled.

`--replay` times an EAGLE-3 head of these shapes, with a draft vocabulary of 32000. Its weights are
zeros, and each draft is replaced by the token of the answer, or by another one: it is right with
this probability. All rows of a batch answer one prompt greedily. Exits with 3 if a bit differs.
"""

import argparse
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")

from benchmarks.common import Rows, environment
from benchmarks.step import MODELS

# isort: split
import jax
import jax.numpy as jnp
import numpy as np

from detjax.engine.config import DRAFT_MODEL, EAGLE3, EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.metrics import DraftCounts
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.running.programs import Candidates, keep_candidates
from detjax.engine.scheduling.drafters import HOST_DRAFTERS
from detjax.engine.speculative_config import SpeculativeConfig
from detjax.models.eagle.head import (
    AnyDraftModel,
    EagleHead,
    load_eagle_head,
    place_eagle_head,
    tensor_shapes,
)
from detjax.models.hub import find_model
from detjax.models.loading import LoadedModel, random_model
from detjax.models.tokenizer import Tokenizer
from detjax.numerics import NumericsProfile
from detjax.opening import load_draft_model, load_on_devices
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh
from detjax.testing.eagle import dummy_eagle, dummy_ids

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
    config = dataclasses.replace(MODELS[args.shapes], max_position_embeddings=args.max_len)
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
        drafts = {"replayed": replaying_head(model)}
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, config.vocab_size, (max(args.batch), args.prompt))
    prompts = [tuple(ids) for ids in prompts.tolist()]
    return Subject(model=model, drafts=drafts, prompts=prompts)


def loaded_subject(args: argparse.Namespace) -> Subject:
    """A model, its draft model and its head from folders, and texts."""
    folder = find_model(args.model)
    model, _ = load_on_devices(
        folder, profile=NumericsProfile(), backend=args.backend, dp=1, tp=1, max_len=args.max_len
    )
    tokenizer = Tokenizer.from_folder(folder)
    drafts: dict[str, AnyDraftModel] = {}
    if args.draft is not None:
        drafts[args.draft] = load_draft_model(args.draft, model=model, tokenizer=tokenizer)
    if args.head is not None:
        drafts[args.head] = load_eagle_head(args.head, model=model)
    texts = [line for line in args.prompts_file.read_text().splitlines() if line.strip()]
    texts = [texts[i % len(texts)] for i in range(max(args.batch))]
    prompts = [tuple(tokenizer.encode(text)) for text in texts]
    if args.chat:
        turns = ([{"role": "user", "content": text}] for text in texts)
        prompts = [tuple(tokenizer.apply_chat_template(turn)) for turn in turns]
    return Subject(model=model, drafts=drafts, prompts=prompts)


def requests_of(subject: Subject, args: argparse.Namespace, batch: int) -> list[Request]:
    """As many requests, every other one sampled."""
    return [
        Request(
            prompt_token_ids=prompt,
            sampling=SamplingParams(
                max_tokens=args.tokens, temperature=float(i % 2), seed=i if i % 2 else None
            ),
        )
        for i, prompt in enumerate(subject.prompts[:batch])
    ]


def make_engine(
    subject: Subject,
    args: argparse.Namespace,
    batch: int,
    method: str,
    draft: AnyDraftModel | None,
    candidates: Candidates = keep_candidates,
) -> Engine:
    """An engine whose drafts come from one source, or that makes none."""
    options: dict[str, Any] = {}
    drafters = HOST_DRAFTERS
    if method != "none":
        speculative = SpeculativeConfig(
            method=method,
            model="given" if draft is not None else "",
            num_speculative_tokens=args.drafts,
            disable_by_batch_size=batch,
            is_adaptive=args.adaptive,
        )
        options, drafters = speculative.engine_options(), speculative.drafters()
    config = EngineConfig(
        batch_size=batch, prefill_chunk=min(512, args.max_len), max_len=args.max_len,
        self_check="off", **options,
    )  # fmt: skip
    return Engine(
        subject.model, config, candidates=candidates, drafters=drafters, draft_model=draft
    )


def replaying_head(model: LoadedModel) -> EagleHead:
    """A head of a model's shapes whose drafts nobody looks at."""
    eagle = dummy_eagle(model.config, draft_vocab_size=min(32000, model.config.vocab_size))
    num_layers = model.config.num_layers
    layers = 1, max(1, num_layers // 2), num_layers - 1
    eagle = dataclasses.replace(eagle, feature_layers=layers)
    tensors = {name: np.zeros(shape, np.float32) for name, shape in tensor_shapes(eagle).items()}
    return place_eagle_head(eagle, tensors, dummy_ids(eagle), model=model)


def replayed(
    prompt: Sequence[int], answer: Sequence[int], *, share: float, vocab_size: int
) -> Candidates:
    """Drafts of a known text, each right with a probability."""
    text = np.array([*prompt, *answer], np.int32)
    is_right = np.random.default_rng(1).random(len(text)) < share
    drafts = jnp.asarray(np.where(is_right, text, (text + 1) % vocab_size))

    def candidates(token_ids, positions):
        return drafts[jnp.clip(positions, 0, len(text) - 1)]

    return candidates


def measure_replay(subject: Subject, args: argparse.Namespace, batch: int, rows: Rows) -> bool:
    """Time a head whose acceptance is given; False if a bit differs."""
    prompt, model = subject.prompts[0], subject.model
    sampling = SamplingParams(max_tokens=args.tokens, temperature=0.0)
    asked = [Request(prompt_token_ids=prompt, sampling=sampling)] * batch
    expected, base, is_right, candidates = None, 0.0, True, keep_candidates
    for method, head in (("none", None), (EAGLE3, subject.drafts["replayed"])):
        engine = make_engine(subject, args, batch, method, head, candidates=candidates)
        engine.compile(requests=asked)
        answers = engine.generate(asked)  # also warms up
        expected = expected or answers
        rate = statistics.median(rate_of(engine, asked) for _ in range(args.rounds))
        base = rate if method == "none" else base
        pairs = zip(answers, expected, strict=True)
        different = sum(one.digest() != other.digest() for one, other in pairs)
        counts = engine.stats().drafts.get(method, DraftCounts())
        rows.keep(
            subject="speculation", source=method, draft="replayed", batch=batch,
            drafts=0 if method == "none" else args.drafts, is_adaptive=args.adaptive,
            tokens_per_s=rate, ratio_to_none=rate / base, acceptance=counts.acceptance,
            tokens_per_window=counts.tokens_per_window, different=different, answers=batch,
        )  # fmt: skip
        is_right &= different == 0
        candidates = replayed(
            prompt, expected[0].token_ids, share=args.replay, vocab_size=model.config.vocab_size
        )
        del engine
    return is_right


def measure(subject: Subject, args: argparse.Namespace, batch: int, rows: Rows) -> bool:
    """Time every source on the same requests; False if a bit differs."""
    sources: list[tuple[str, str, AnyDraftModel | None]] = [
        (name, "", None) for name in ("none", "ngram", "suffix")
    ]
    sources += [
        (EAGLE3 if isinstance(draft, EagleHead) else DRAFT_MODEL, name, draft)
        for name, draft in subject.drafts.items()
    ]
    asked, expected, base, is_right = requests_of(subject, args, batch), None, 0.0, True
    for method, name, draft in sources:
        engine = make_engine(subject, args, batch, method, draft)
        engine.compile(requests=asked)
        answers = engine.generate(asked)  # also warms up
        digests = [done.digest() for done in answers]
        expected = digests if expected is None else expected
        rates = [rate_of(engine, asked) for _ in range(args.rounds)]
        rate = statistics.median(rates)
        base = rate if method == "none" else base
        different = sum(one != other for one, other in zip(digests, expected, strict=True))
        counts = engine.stats().drafts.get(method, DraftCounts())
        rows.keep(
            subject="speculation", source=method, draft=name, batch=batch,
            drafts=0 if method == "none" else args.drafts, is_adaptive=args.adaptive,
            tokens_per_s=rate,
            ratio_to_none=rate / base, acceptance=counts.acceptance,
            tokens_per_window=counts.tokens_per_window, different=different, answers=len(asked),
        )  # fmt: skip
        is_right &= different == 0
        del engine
    return is_right


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
    parser.add_argument("--shapes", choices=MODELS, default="llama3_8b")
    parser.add_argument(
        "--layers", type=int, default=2, help="of the draft model of random weights"
    )
    parser.add_argument("--noise", type=float, nargs="+", default=[0.0, 0.3, 1.0])
    parser.add_argument("--replay", type=float, help="how often a draft is right, from 0 to 1")
    parser.add_argument("--backend", choices=[b.value for b in Backend], default="sm90")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--drafts", type=int, default=3, help="tokens a window")
    parser.add_argument("--adaptive", action="store_true", help="fewer drafts where that is faster")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a random prompt")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--max-len", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", help="write JSON rows here")
    return parser


def main() -> None:
    """Measure; exit 3 if a bit differs from that of no drafts."""
    parser = make_parser()
    args = parser.parse_args()
    if args.replay is not None and args.model is not None:
        parser.error("--replay is of random weights; leave --model out")
    if args.model is not None and not ((args.draft or args.head) and args.prompts_file):
        parser.error("--model needs --prompts-file, and --draft or --head")
    backend = Backend(args.backend)
    what = args.model or f"{args.shapes}, {args.layers} layers that add"
    rows = Rows(environment(backend) | {"model": what, "backend": args.backend}, args.out)
    subject = loaded_subject(args) if args.model is not None else random_subject(args, backend)
    measured = measure if args.replay is None else measure_replay
    results = [measured(subject, args, batch, rows) for batch in args.batch]
    sys.exit(0 if all(results) else 3)


if __name__ == "__main__":
    main()
