# SPDX-License-Identifier: Apache-2.0
"""Every bit at the size of production: a cache that fills the GPU, long prompts, full batches.

python -m benchmarks.production --out production.jsonl
python -m benchmarks.production --parts 131072 dvr
python -m benchmarks.production --model tiny --backend portable --pages 200 --parts 1280 control

Engines of many lengths and batch sizes answer one pool of requests, whose prompts end around every
page and split boundary, alone and in company. Every token and logprob is compared with the
canonical choice at its position, which comes from another path on a small cache of its own: windows
of 256 tokens through prefill's kernels. Where layers have a sliding window or linear attention, an
engine has pages for them alone, and the reference has one table for all layers. Exit status 3 if a
bit differs, or if the control, kernels without a claim, shows no difference.
"""

import argparse
import collections
import dataclasses
import gc
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

import jax
import numpy as np

from benchmarks.common import Rows, environment
from benchmarks.production_requests import PAGE, SPLIT, DrawnRequest, Texts, pool, with_option_sets
from benchmarks.step import MODELS
from detjax.defaults import AUTO, KV_CACHE_DTYPES
from detjax.engine.config import EngineConfig, ReplicaConfig
from detjax.engine.engine import Engine
from detjax.engine.outputs.completion import Completion
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.running.choice_programs import pack_windows
from detjax.engine.running.device_arrays import (
    Slots,
    empty,
    empty_pages,
    sampling_shape,
    slots_shape,
)
from detjax.engine.running.launch_operands import PrefillOperands, VerifyOperands, unpack_choice
from detjax.engine.running.memory import cache_bytes, enough_local, pages_in
from detjax.engine.running.program_key import ChoiceKey, ProgramKey, program_keys
from detjax.engine.running.programs import ProgramCache
from detjax.engine.sampling.adjustments import AdjustedSlots, count_uses, pack_record, recent_tokens
from detjax.engine.sampling.sampling import SamplingRows
from detjax.models.config import RopeConfig, RopeKind
from detjax.models.fast import NARROWED
from detjax.models.loading import LoadedModel, random_model
from detjax.models.quantization.quantize import RECIPES
from detjax.models.rope import rope_tables
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh
from detjax.testing.programs import plain_key
from detjax.testing.quantized import quantized_model

WINDOW = 16
"""Tokens of a verification, few enough for the kernels of decode."""
REFERENCE_WINDOW, BULK = 256, 4096
"""Tokens of the reference's windows, and of its prefill of what comes before them."""
DRAFTS = 7
"""Of a window whose tokens one launch rotates and attends from: `MOST_NEW_TOKENS` less one."""
CONTEXT = 131072
QWEN3_YARN = RopeConfig(
    theta=1e6, kind=RopeKind.YARN, factor=4.0, original_max_position=32768, beta_fast=32.0,
    beta_slow=1.0, attention_factor=0.1 * math.log(4.0) + 1.0,
)  # fmt: skip
"""What Qwen3's model cards recommend for 131072 tokens, with the defaults of transformers."""

Kept = tuple[int, int]
"""A token id and the bits of its logprob."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """An engine and what it is asked, list after list.

    Attributes:
        name: Of the part.
        config: Of the engine, but for the cache's size.
        batches: Lists of requests, each answered together.
        skipped_pages: Share of the cache that nobody uses, so that what is used lies at its end.
        rope: Of the rotary embedding, if another than the model's.
        is_compiled_ahead: All programs are, not those alone that the lists need.
        is_scored: Every answer is also scored, as a prompt.
        is_predicted: Each list is asked again, with drafts made of its own answers.
    """

    name: str
    config: dict
    batches: list[list[DrawnRequest]]
    skipped_pages: float = 0.0
    rope: RopeConfig | None = None
    is_compiled_ahead: bool = True
    is_scored: bool = False
    is_predicted: bool = False


def parts(limit_tokens: int) -> Iterator[Part]:
    """All parts, for a cache of so many tokens."""
    base = {"verify_window": WINDOW, "has_prefix_cache": False}
    eight = {"prefill_chunk": 512, "prefill_shapes": ((8, 512),)}
    short = pool(1280, 256, tokens=40, first=0)
    few = short[::33], short[:3], short[9:10]
    yield Part(
        name="1280",
        config=base
        | eight
        | {
            "batch_size": 256,
            "max_len": 1280,
            "decode_batches": (1, 8, 16, 64, 128),
            "has_prefix_cache": True,
        },
        batches=[short, short[:128], short[5:69], short[30:46], *few],
    )
    looked_up = [dataclasses.replace(a, period=40) for a in pool(512, 24, tokens=40, first=300)]
    yield Part(
        name="512",
        config=base
        | {
            "batch_size": 24,
            "max_len": 512,
            "prefill_chunk": 300,
            "verify_rows": 1,
            "has_prompt_lookup": True,
        },
        batches=[looked_up],
        skipped_pages=0.9,
    )
    middle = pool(4352, 64, tokens=40, first=400)
    yield Part(
        name="4352",
        config=base | eight | {"batch_size": 64, "max_len": 4352, "decode_batches": (1, 8)},
        batches=[middle, middle[40:48], middle[-8:], middle[-12:-11], short[4:12], short[7:8]],
        skipped_pages=0.3,
    )
    long = [
        DrawnRequest(idx=600 + i, length=n, temperature=(0.0, 1.0)[i % 2], count=24)
        for i, n in enumerate((8100, 8168, 4095, 4096, 6143, 7679, 5000, 8000))
    ]
    yield Part(
        name="8192",
        config=base
        | {"batch_size": 64, "max_len": 8192, "decode_batches": (1, 8), "prefill_chunk": 4000},
        batches=[long, long[:1], middle[:56] + long],
        skipped_pages=0.4,
    )
    longer = [
        DrawnRequest(idx=700 + i, length=n, temperature=(0.0, 1.0)[i % 2], count=24)
        for i, n in enumerate((32700, 16383, 16384, 30000))
    ]
    yield Part(
        name="32768",
        config=base
        | {"batch_size": 128, "max_len": 32768, "decode_batches": (8,), "prefill_chunk": 4096},
        batches=[longer, short[:100] + middle[:20] + longer],
    )
    longest = [
        DrawnRequest(idx=800 + i, length=n, temperature=(1.0, 0.0)[i % 2], count=24)
        for i, n in enumerate((131000, 65535, 100000))
        if n + 24 <= limit_tokens // 3
    ]
    yield Part(
        name="131072",
        config=base
        | {
            "batch_size": 256,
            "max_len": CONTEXT,
            "decode_batches": (1, 16),
            "prefill_chunk": 512,
            "prefill_shapes": ((1, 4096),),
        },
        batches=[longest, short[:240] + longest[:1], longest[1:2], short[::33]],
    )
    yield Part(
        name="loop",
        config=base
        | eight
        | {"batch_size": 64, "max_len": 1280, "decode_batches": (8,), "decode_steps": 8},
        batches=[short[:128], short[90:98]],
        skipped_pages=0.5,
    )
    yield Part(
        name="dvr",
        config=base
        | eight
        | {
            "batch_size": 64,
            "max_len": 4352,
            "mode": "dvr",
            "max_draft_fraction": 1.0,
            "verify_rows": 32,
            "verify_batches": (1,),
            "decode_steps": 4,
        },
        batches=[short[:128], middle[-8:], short[40:41]],
        skipped_pages=0.5,
    )
    windowed = short + [a for a in middle if a.length < 4000]
    yield Part(
        name="drafts",
        config=base
        | eight
        | {
            "batch_size": 16,
            "max_len": 4096,
            "decode_batches": (1, 2, 4),
            "decode_lens": (512, 1024),
            "verify_window": DRAFTS + 1,
            "verify_rows": 16,
            "verify_batches": (1, 2, 4),
            "has_prompt_lookup": True,
        },
        batches=[
            windowed[::5],
            *(windowed[-n:] for n in (1, 2, 4)),
            *(short[10 - n : 10] for n in (1, 2, 4)),
        ],
        skipped_pages=0.6,
        is_predicted=True,
    )
    yield Part(
        name="adjusted",
        config=base | {"batch_size": 40, "max_len": 1280, "prefill_chunk": 512},
        batches=[with_option_sets(pool(1280, 40, tokens=40, first=1000))],
        skipped_pages=0.7,
        is_compiled_ahead=False,
        is_scored=True,
    )
    stretched = [
        DrawnRequest(idx=900 + i, length=n, temperature=(0.0, 1.0)[i % 2], count=16)
        for i, n in enumerate((32760, 131000))
        if n + 24 <= limit_tokens // 3
    ]
    if stretched:
        yield Part(
            name="yarn",
            config=base | {"batch_size": 2, "max_len": CONTEXT, "prefill_chunk": BULK},
            batches=[stretched],
            rope=QWEN3_YARN,
            is_compiled_ahead=False,
        )
    yield Part(
        name="control",
        config=base | {"batch_size": 8, "max_len": 1280, "mode": "fast", "prefill_chunk": 512},
        batches=[short[:8]],
    )


PARTS = tuple(part.name for part in parts(1 << 40))


def programs_of(part: Part) -> set[ProgramKey]:
    """What a part's engine may run."""
    config = EngineConfig(**part.config)
    replica = ReplicaConfig.of(config, dp=1, page_len=PAGE, steps_beat_xla=True)
    return set(program_keys(replica))


class Reference:
    """The canonical choice at a position, from windows of a small cache."""

    def __init__(self, model: LoadedModel, context: int):
        """Allocate a cache of `context` tokens and compile two programs."""
        self._model = model
        table_len = -(-context // PAGE) + 2
        num_pages = table_len + 1
        self._programs = ProgramCache(
            model, num_pages=num_pages, num_slots=1, window_len=REFERENCE_WINDOW
        )
        self._bulk = plain_key("prefill", rows=1, length=BULK, table_len=table_len)
        self._window = plain_key(
            "verify", rows=1, length=REFERENCE_WINDOW, table_len=table_len,
            logit_rows=REFERENCE_WINDOW,
        )  # fmt: skip
        self._logits = empty(model, self._programs.logits_shape(REFERENCE_WINDOW))
        for key in (self._bulk, self._window):
            self._programs.get(key, model.params)
        self._pages = empty_pages(model, num_pages)
        self._slots = empty(model, slots_shape(model, 1, REFERENCE_WINDOW))
        self._sampling = empty(model, sampling_shape(model, 1))
        # Not the identity, and no page 0.
        self._table = np.arange(table_len, 0, -1, dtype=np.int32)

    def _run(self, key: ProgramKey, tables: tuple, *operands):
        program = self._programs.get(key, self._model.params)
        left = [self._logits] if key.logit_rows else []
        self._pages, self._slots, *rest, result = program(
            self._model.params, tables, self._pages, self._slots, self._sampling, *left, *operands
        )
        if key.kind == "prefill":
            (self._sampling,) = rest
        else:
            (self._logits,) = rest
        return result

    def choices(
        self, drawn: DrawnRequest, tokens: Sequence[int], sampling: SamplingParams, tables: tuple
    ) -> list[Kept]:
        """The choice behind the prompt, and behind each of the `tokens` that follow it."""
        rows = SamplingRows.pack([(sampling.for_prompt(tokens[: drawn.length]), 0)])
        shardings = jax.tree.map(lambda x: x.sharding, self._sampling)
        self._sampling = jax.tree.map(jax.device_put, rows, shardings)
        first = drawn.length - 1
        is_adjusted = sampling.is_adjusted or sampling.is_filtered
        at, results = 0, []
        while first - at >= BULK:
            at = self._prefill(tokens, at, BULK, rows, tables)
        while at < len(tokens):
            # What follows the first token of a window counts as the completion's.
            is_prompt = is_adjusted and at < first
            ids = tokens[at : min(at + REFERENCE_WINDOW, first if is_prompt else len(tokens))]
            kept = None
            if is_adjusted and not is_prompt:
                kept = self._adjustments(drawn, tokens[: at + 1], sampling)
            results.append((at, self._verify(ids, at, tables, kept), len(ids)))
            at += len(ids)
        found = []
        for start, packed, count in results:
            choice = unpack_choice(np.asarray(packed)[0], 0)
            bits = choice.logprobs.view(np.uint32)
            found += [
                (int(choice.token_ids[i]), int(bits[i])) for i in range(count) if start + i >= first
            ]
        return found

    def _adjustments(
        self, drawn: DrawnRequest, tokens: Sequence[int], sampling: SamplingParams
    ) -> AdjustedSlots:
        """What a slot keeps of a request whose text so far is `tokens`."""
        config, shapes = self._model.config, self._programs.adjusted_shape
        record = pack_record(
            sampling,
            prompt_len=drawn.length,
            end_token_ids=sampling.end_token_ids(config.eos_token_ids),
            vocab_size=config.vocab_size,
        )
        prompt, output = tokens[: drawn.length], tokens[drawn.length :]
        kept = AdjustedSlots(
            record=record[None],
            recent=recent_tokens(output)[None],
            uses=count_uses(prompt, output, shapes.uses.shape[1])[None],
        )
        return jax.tree.map(lambda x, shape: jax.device_put(x, shape.sharding), kept, shapes)

    def _prefill(self, tokens, at: int, count: int, rows, tables: tuple) -> int:
        ids = tokens[at : at + count]
        operands = PrefillOperands.padding(
            1, no_slot=1, table_len=self._bulk.table_len, length=self._bulk.length
        )
        operands.slot[0], operands.start[0], operands.count[0] = 0, at, len(ids)
        operands.page_table[0] = self._table
        operands.token_ids[0, : len(ids)] = ids
        self._run(self._bulk, tables, operands.pack(), rows)
        return at + len(ids)

    def _verify(self, ids, at: int, tables: tuple, adjusted: AdjustedSlots | None):
        """A window whose first token is the slot's own."""
        operands = VerifyOperands.padding(
            1, no_slot=1, table_len=self._window.table_len, length=self._window.length
        )
        operands.slot[0], operands.num_drafts[0], operands.is_given[0] = 0, len(ids) - 1, 1
        operands.page_table[0] = self._table
        operands.token_ids[0, : len(ids)] = ids
        window = np.zeros((1, REFERENCE_WINDOW), np.int32)
        window[0, 0] = ids[0]
        slots = Slots.without_drafts(window, np.full(1, at, np.int32))
        shardings = jax.tree.map(lambda x: x.sharding, self._slots)
        self._slots = jax.tree.map(jax.device_put, slots, shardings)
        result = self._run(self._window, tables, operands.pack())
        if adjusted is None:
            return result
        key = ChoiceKey(rows=1, length=REFERENCE_WINDOW, with_filters=True, num_top=0)
        choose = self._programs.get(key, self._model.params)
        windows = pack_windows(operands, np.zeros(1, np.int32))
        self._slots, _, result = choose(
            self._slots, self._sampling, adjusted, self._logits, windows, result
        )
        return result


@dataclasses.dataclass(kw_only=True)
class Outcome:
    """What a part's answers were."""

    part: Part
    num_pages: int
    num_local_pages: int
    error: str
    seconds: float
    answers: list[tuple[DrawnRequest, list[Kept]]] = dataclasses.field(default_factory=list)
    programs: int = 0
    windows: int = 0
    rollbacks: int = 0
    self_check_s: float = 0.0
    self_checked: int = 0
    self_check_differences: int = 0


class Suite:
    """One model and a cache that fills what the GPU has left."""

    def __init__(self, args: argparse.Namespace):
        """Load the model and size the cache."""
        config = MODELS[args.model]
        config = config.with_layers(range(args.layers or config.num_layers))
        config = dataclasses.replace(config, max_position_embeddings=CONTEXT)
        backend = Backend(args.backend)
        profile = NumericsProfile.of("bfloat16", args.kv_cache_dtype)
        self.model = random_model(
            config, seed=0, profile=profile,
            mesh=make_mesh(1, 1, platform=backend.platform), backend=backend,
        )  # fmt: skip
        if args.weights != "bfloat16":
            self.model = quantized_model(self.model, args.weights)
        self.gpu_bytes = self.free_bytes = 0
        self._args = args
        if not args.pages:
            stats = jax.devices(backend.platform)[0].memory_stats()
            self.gpu_bytes = stats["bytes_limit"]
            self.free_bytes = self.gpu_bytes - stats["bytes_in_use"]
        self.texts = Texts(config.vocab_size)
        self._models = {None: self.model}
        self._programs: dict[tuple, ProgramCache] = {}

    def model_of(self, part: Part) -> LoadedModel:
        """The model, with a part's rotary embedding."""
        if part.rope not in self._models:
            config = dataclasses.replace(self.model.config, rope=part.rope)
            made = rope_tables(part.rope, head_dim=config.head_dim, max_len=CONTEXT)
            tables = tuple(
                jax.device_put(new, old.sharding)
                for new, old in zip(made, self.model.rope_tables, strict=True)
            )
            self._models[part.rope] = dataclasses.replace(
                self.model, config=config, rope_tables=tables
            )
        return self._models[part.rope]

    def num_pages(self, part: Part) -> tuple[int, int]:
        """Pages of a part's cache, and of local layers; 0 where they have those of the others.

        They take a share of what the weights leave, 8-bit ones of drafts too.
        """

        def local_of(num_pages: int) -> int:
            return enough_local(self.model, EngineConfig(**part.config), num_pages)

        num_pages = self._args.pages
        if not num_pages:
            free_bytes = self.free_bytes
            if part.config.get("mode", "invariant") != "invariant":
                free_bytes -= _draft_bytes(self.model.params)
            room = int(self._args.share * free_bytes)
            num_pages = pages_in(room, self.model, local_of=local_of)
        return num_pages, local_of(num_pages)

    def cache_bytes(self, outcome: Outcome) -> int:
        """Of the cache that a part had."""
        local = outcome.num_local_pages
        return cache_bytes(self.model, outcome.num_pages, num_local_pages=local)

    def _asked(
        self, engine: Engine, part: Part, drawn_requests: list[DrawnRequest]
    ) -> list[tuple[DrawnRequest, list[Kept]]]:
        """The answers to one list, to every request as often as the part asks it."""
        is_deterministic = part.config.get("mode") != "fast"
        requests = [
            a.request(self.texts, is_deterministic=is_deterministic) for a in drawn_requests
        ]
        got = engine.generate([_scored(r) if part.is_scored else r for r in requests])
        answers = [(a, kept(c)) for a, c in zip(drawn_requests, got, strict=True)]
        if part.is_scored:
            answers += scores(engine, drawn_requests, requests, got)
        if part.is_predicted:
            with_drafts = [
                dataclasses.replace(request, predicted_token_ids=predicted(drawn, completion))
                for drawn, request, completion in zip(drawn_requests, requests, got, strict=True)
            ]
            again = engine.generate(with_drafts)
            answers += [(a, kept(c)) for a, c in zip(drawn_requests, again, strict=True)]
        return answers

    def run(self, part: Part) -> Outcome:
        """Ask a part's engine everything; its cache is free again afterwards."""
        begin = time.perf_counter()
        num_pages, num_local = self.num_pages(part)
        config = EngineConfig(num_pages=num_pages, num_local_pages=num_local, **part.config)
        key = part.rope, config.batch_size, num_pages, num_local
        try:
            engine = Engine(self.model_of(part), config, programs=self._programs.get(key))
            self._programs[key] = engine.programs
            if part.is_compiled_ahead:
                engine.compile()
        except RuntimeError as raised:
            # The other parts still run, and are compared; this one fails.
            print(f"part {part.name}: {_name(raised)}", flush=True)
            seconds = time.perf_counter() - begin
            return Outcome(
                part=part, num_pages=num_pages, num_local_pages=num_local, error=_name(raised),
                seconds=seconds,
            )  # fmt: skip
        compiled_s = time.perf_counter() - begin
        # A difference ends every request with an error, so say it first.
        print(f"part {part.name}: self-check {engine.self_check_error or 'passed'}", flush=True)
        skipped = int(part.skipped_pages * num_pages)
        pages = engine._scheduler.pools[0]
        held = pages.allocate(skipped)
        answers, error = [], ""
        for drawn_requests in part.batches:
            try:
                answers += self._asked(engine, part, drawn_requests)
            except (FloatingPointError, RuntimeError) as raised:
                error = _name(raised)
                break
        pages.free(held)
        stats = engine.stats()
        num_compiled = stats.num_compiled
        numbers = stats.num_windows, stats.num_rollbacks
        if not part.is_compiled_ahead:
            compiled_s += stats.compile_s
        del engine, pages
        gc.collect()
        seconds = time.perf_counter() - begin
        print(
            f"part {part.name}: {num_compiled} programs in {compiled_s:.0f} s "
            f"({stats.self_check_s:.1f} s of it checking {stats.num_self_checked}), "
            f"{sum(len(k) for _, k in answers)} tokens in {seconds - compiled_s:.0f} s {error}",
            flush=True,
        )
        return Outcome(
            part=part, num_pages=num_pages, num_local_pages=num_local, answers=answers,
            error=error, programs=num_compiled,
            seconds=seconds, windows=numbers[0], rollbacks=numbers[1],
            self_check_s=stats.self_check_s, self_checked=stats.num_self_checked,
            self_check_differences=stats.num_self_check_differences,
        )  # fmt: skip


def _name(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]


def _scored(request: Request) -> Request:
    sampling = dataclasses.replace(request.sampling, prompt_logprobs=0)
    return dataclasses.replace(request, sampling=sampling)


def predicted(drawn: DrawnRequest, completion: Completion) -> tuple[int, ...]:
    """Drafts: an answer, of two in three with a wrong token somewhere."""
    ids = list(completion.token_ids)
    if drawn.idx % 3:
        ids[7 * drawn.idx % len(ids)] ^= 1
    return tuple(ids)


def scores(
    engine: Engine,
    drawn_requests: list[DrawnRequest],
    requests: list[Request],
    done: list[Completion],
) -> list[tuple[DrawnRequest, list[Kept]]]:
    """Answers whose logprobs are the model's own, scored by prefill, as decode must have them."""
    again = [
        dataclasses.replace(
            request,
            prompt_token_ids=(*request.prompt_token_ids, *completion.token_ids),
            # One token more, so that these are prefills of the variant that is compiled.
            sampling=dataclasses.replace(
                _scored(request).sampling, max_tokens=1, min_tokens=0
            ),
        )
        for request, completion in zip(requests, done, strict=True)
    ]  # fmt: skip
    found = []
    for drawn, request, completion, scored in zip(
        drawn_requests, requests, done, engine.generate(again), strict=True
    ):
        if request.sampling.logprobs_mode == "raw" and completion.token_ids:
            assert scored.prompt_logprobs is not None
            logprobs = [one.logprob for one in scored.prompt_logprobs]
            bits = np.asarray(logprobs[-len(completion.token_ids) :], np.float32).view(np.uint32)
            found.append((drawn, list(zip(completion.token_ids, map(int, bits), strict=True))))
    return found


def _draft_bytes(params: dict) -> int:
    """What `quantise_params` adds to a model: 8 bits an element, a scale an output channel."""
    layers = params["layers"]
    matrices = [layer[name] for layer in layers for name in NARROWED if name in layer]
    return sum(math.prod(w.shape) + 4 * w.shape[0] for w in (*matrices, params["lm_head"]))


def kept(completion: Completion) -> list[Kept]:
    """Token ids and the bits of logprobs."""
    bits = np.asarray(completion.logprobs, np.float32).view(np.uint32)
    return [(t, int(b)) for t, b in zip(completion.token_ids, bits, strict=True)]


def references(suite: Suite, outcomes: list[Outcome]) -> dict[int, list[Kept]]:
    """The canonical answer to each request: what the reference says at every position of the first.

    An answer is canonical if each of its tokens is the choice after those before it, so one pass
    over the tokens of any answer tells whether all of it is, and if not, up to where.
    """
    firsts: dict[int, tuple[DrawnRequest, list[Kept], LoadedModel]] = {}
    # The control's answers tell what is canonical where no other part has been asked.
    for outcome in sorted(outcomes, key=lambda outcome: outcome.part.name == "control"):
        for drawn, answer in outcome.answers:
            firsts.setdefault(drawn.idx, (drawn, answer, suite.model_of(outcome.part)))
    longest = max((a.length + a.count for a, *_ in firsts.values()), default=1)
    reference, want = Reference(suite.model, longest), {}
    for drawn, answer, model in firsts.values():
        prompt = suite.texts.prompt(drawn)
        sampling = drawn.sampling(suite.texts.vocab_size)
        tokens = (*prompt, *(t for t, _ in answer))[:-1]
        choices = reference.choices(drawn, tokens, sampling, model.rope_tables)
        # Behind a wrong token the choices are of a wrong text: mend one after the other.
        while (right := _right_tokens(choices, tokens[len(prompt) :])) is not None:
            tokens = (*prompt, *right, *tokens[len(prompt) + len(right) :])
            choices = reference.choices(drawn, tokens, sampling, model.rope_tables)
        want[drawn.idx] = choices
    return want


def _right_tokens(choices: list[Kept], given: Sequence[int]) -> tuple[int, ...] | None:
    """The choices up to the first that was not given; None if all were."""
    for i, token in enumerate(given):
        if choices[i][0] != token:
            return tuple(t for t, _ in choices[: i + 1])
    return None


def report(suite: Suite, outcome: Outcome, want: dict[int, list[Kept]], rows: Rows) -> bool:
    """Keep a row; whether the part is as it must be."""
    wrong, compared, where = 0, 0, collections.Counter()
    for drawn, answer in outcome.answers:
        for i, (got, right) in enumerate(zip(answer, want[drawn.idx], strict=False)):
            compared += 1
            if got != right:
                wrong += 1
                where[(drawn.length + i) % SPLIT] += 1
    rows.keep(
        subject="production", case=outcome.part.name, max_len=outcome.part.config["max_len"],
        mode=outcome.part.config.get("mode", "invariant"), gpu_bytes=suite.gpu_bytes,
        free_bytes=suite.free_bytes, cache_bytes=suite.cache_bytes(outcome),
        num_pages=outcome.num_pages, num_local_pages=outcome.num_local_pages,
        layers=suite.model.config.num_layers,
        longest_prompt=max(a.length for batch in outcome.part.batches for a in batch),
        most_rows=max(len(batch) for batch in outcome.part.batches),
        programs=outcome.programs, compared_tokens=compared, different=wrong,
        worst_positions=str(where.most_common(3)), windows=outcome.windows,
        rollbacks=outcome.rollbacks, self_check_s=round(outcome.self_check_s, 2),
        self_checked=outcome.self_checked, self_check_differences=outcome.self_check_differences,
        error=outcome.error, seconds=round(outcome.seconds, 1),
    )  # fmt: skip
    if outcome.part.name == "control":
        return wrong > 0
    if outcome.part.is_predicted and not outcome.windows > outcome.rollbacks > 0:
        return False  # not every draft was right, nor wrong
    return wrong == 0 and compared > 0 and not outcome.error


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    options.add_argument("--model", choices=MODELS, default="llama3_8b")
    options.add_argument("--backend", choices=[b.value for b in Backend], default="sm90")
    options.add_argument(
        "--weights", choices=["bfloat16", *RECIPES], default="bfloat16",
        help="of the layers' matrices, with 8-bit activations if the scheme asks for them",
    )  # fmt: skip
    options.add_argument(
        "--kv-cache-dtype",
        choices=[*KV_CACHE_DTYPES, "fp8"],
        default=AUTO,
        help="of keys and values",
    )
    options.add_argument("--layers", type=int, default=0, help="fewer layers; all if 0")
    options.add_argument("--parts", choices=PARTS, nargs="+", default=PARTS, metavar="PART",
                        help=f"of {', '.join(PARTS)}")  # fmt: skip
    options.add_argument("--pages", type=int, default=0, help="of the cache; --share if 0")
    options.add_argument(
        "--share", type=float, default=0.87, help="of what the GPU has left, for the cache"
    )
    options.add_argument("--out", help="write JSON rows here")
    return options


def main() -> None:
    """Run the parts, then the reference; exit 3 if a bit differed."""
    args = parser().parse_args()
    card = environment(Backend(args.backend)) | {
        "model": args.model, "backend": args.backend, "data": "random weights and prompts",
        "weights": args.weights, "kv_cache_dtype": args.kv_cache_dtype,
    }  # fmt: skip
    rows = Rows(card, args.out)
    suite = Suite(args)
    most = max(suite.num_pages(part)[0] for part in parts(1 << 40))
    print(f"{most} pages in {suite.free_bytes / 1e9:.1f} GB free", flush=True)
    wanted = [p for p in parts(most * PAGE) if p.name in args.parts]
    if len(suite.model.config.ropes) > 1:
        # Its layers have angles of their own; a part's would be those of all.
        wanted = [part for part in wanted if part.rope is None]
        print(f"part yarn: left out, as {args.model} has several rotary embeddings", flush=True)
    outcomes = [suite.run(part) for part in wanted]
    begin = time.perf_counter()
    want = references(suite, outcomes)
    print(f"reference of {len(want)} answers in {time.perf_counter() - begin:.0f} s", flush=True)
    is_right = [report(suite, outcome, want, rows) for outcome in outcomes]
    total = sum(row["compared_tokens"] for row in rows.rows if row["case"] != "control")
    different = sum(row["different"] for row in rows.rows if row["case"] != "control")
    print(f"{total} tokens and logprobs compared, {different} different")
    sys.exit(0 if all(is_right) else 3)


if __name__ == "__main__":
    main()
