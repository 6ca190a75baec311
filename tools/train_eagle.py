# SPDX-License-Identifier: Apache-2.0
r"""Train an EAGLE-3 head for a model on the model's own greedy text.

    python tools/train_eagle.py --model FOLDER --out HEAD
    python tools/train_eagle.py --model FOLDER --out HEAD --chat --prompts-file prompts.txt
    python tools/train_eagle.py --model novels-6m --out HEAD --prompts 64 --steps 60 --batch-size 4
    python tools/train_eagle.py --model FOLDER --out HEAD --texts-file answers.npz --layers 10 20 28

The model answers prompts greedily: lines of a file, or texts that it samples itself at
temperature 1 (of a chat model, questions behind the opening of a user's turn; Xu et al. 2024,
arXiv:2406.08464). The head learns the model's distributions over the tokens of these answers, in
several steps of its own (training-time test, Li et al. 2025, arXiv:2503.01840). Its last matrix
begins as rows of the model's. Some prompts are held out. At the end the engine drafts for them with
the head that was written, and prints the acceptance and whether a bit differs; before that for as
many prompts of the training, which tells a head that has learned little from one that has learned
by heart. `--out` has SGLang's form, which `--speculative-config` reads. `--texts-file` keeps the
answers for the next head.

This is a trainer, not the canonical path: its arithmetic makes no claim. Needs one device.
"""

import argparse
import dataclasses
import functools
import gc
import itertools
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich.progress

from detjax.defaults import EAGLE3
from detjax.engine.engine import Engine
from detjax.engine.metrics import DraftCounts
from detjax.engine.outputs.completion import Completion
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.speculative_config import SpeculativeConfig
from detjax.models.heads.config import HeadConfig
from detjax.models.heads.eagle import joined_params, load_eagle_head, tensor_shapes
from detjax.models.heads.eagle_config import NUM_FEATURES, default_feature_layers, layer_like
from detjax.models.heads.features import text_states
from detjax.models.heads.save import save_eagle_head
from detjax.models.hub import find_model
from detjax.models.loading import LoadedModel
from detjax.models.rope import rope_tables
from detjax.models.tokenizer import Tokenizer
from detjax.numerics import NumericsProfile
from detjax.opening import load_on_devices
from detjax.sizing import choose_sizes

type Tensors = dict[str, jax.Array]

_BEGIN_S = time.perf_counter()


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """A prompt and the model's greedy answer."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def note(text: str) -> None:
    """Tell the one who waits, with the seconds since the start."""
    print(f"{time.perf_counter() - _BEGIN_S:6.1f} s  {text}", file=sys.stderr, flush=True)


# Texts --------------------------------------------------------------------------------------------


def make_engine(model: LoadedModel, args: argparse.Namespace) -> Engine:
    """An engine that answers many prompts at once."""
    is_gpu = model.backend.platform == "gpu"
    sizes = sizes_of(model, args, args.answer_batch or (512 if is_gpu else 8))
    return Engine(model, choose_sizes(model, sizes, gpu_memory_utilization=0.6))


def sizes_of(model: LoadedModel, args: argparse.Namespace, batch: int) -> dict[str, Any]:
    """Sizes of an engine of so many sequences, with few programs and no larger cache than it needs.

    # WHY: with a cache that fills an H200 each program took 6 s to compile.
    """
    pages = -(-args.length // model.profile.attention_block)
    is_gpu = model.backend.platform == "gpu"
    return {
        "decode_steps": args.answer_steps or (4 if is_gpu else 1),
        "max_len": args.length, "self_check": "off", "batch_size": batch, "decode_batches": (),
        "num_pages": batch * pages,
    }  # fmt: skip


def file_prompts(args: argparse.Namespace, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """The lines of a file, as prompts."""
    lines = args.prompts_file.read_text(encoding="utf-8").splitlines()
    texts = [line for line in lines if line.strip()][: args.prompts]
    if args.chat:
        prompts = [chat_prompt(tokenizer, text) for text in texts]
    else:
        prompts = [tuple(tokenizer.encode(text)) for text in texts]
    return list(dict.fromkeys(prompts))  # none that is held out is learned


def chat_prompt(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """A user's turn, and the opening of the answer."""
    return tuple(tokenizer.apply_chat_template([{"role": "user", "content": text}]))


def own_prompts(
    engine: Engine, model: LoadedModel, tokenizer: Tokenizer, args: argparse.Namespace
) -> list[tuple[int, ...]]:
    """Prompts that the model samples."""
    opening: tuple[int, ...] = (model.config.bos_token_id or 0,)
    if args.chat:
        opening = tuple(os.path.commonprefix([chat_prompt(tokenizer, text) for text in "ab"]))
    sampling = SamplingParams(max_tokens=args.prompt_length, temperature=1.0)
    asked = [
        Request(
            prompt_token_ids=opening, sampling=dataclasses.replace(sampling, seed=args.seed + i)
        )
        for i in range(args.prompts)
    ]
    made = engine.generate(asked)
    if not args.chat:
        prompts = [(*opening, *done.token_ids) for done in made]
    else:
        texts = [tokenizer.decode(done.token_ids).strip() for done in made]
        prompts = [chat_prompt(tokenizer, text) for text in texts if text]
    return list(dict.fromkeys(prompts))  # none that is held out is learned


def answer_requests(prompts: Sequence[tuple[int, ...]], length: int) -> list[Request]:
    """Greedy requests, of prompts and answers of `length` tokens at most."""
    return [
        Request(
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=length - len(prompt), temperature=0.0),
        )
        for prompt in prompts
        if len(prompt) < length
    ]


def answer(engine: Engine, prompts: Sequence[tuple[int, ...]], length: int) -> list[Text]:
    """The model's greedy answers."""
    asked = answer_requests(prompts, length)
    begin_s = time.perf_counter()
    with rich.progress.Progress(console=rich.console.Console(stderr=True)) as bar:
        task = bar.add_task("answers", total=len(asked))

        def on_completion(done: Completion) -> None:
            del done
            bar.advance(task)

        made = engine.generate(asked, on_completion=on_completion)
    count = sum(len(done.token_ids) for done in made)
    note(f"{count} tokens of answers in {time.perf_counter() - begin_s:.1f} s")
    return [
        Text(prompt=request.prompt_token_ids, answer=done.token_ids)
        for request, done in zip(asked, made, strict=True)
        if len(done.token_ids) > 1
    ]


def make_texts(model: LoadedModel, tokenizer: Tokenizer, args: argparse.Namespace) -> list[Text]:
    """Answers of the model to prompts of a file or of its own, or those that were kept."""
    kept: Path | None = args.texts_file
    if kept is not None and kept.exists():
        texts = read_texts(kept, vocab_size=model.config.vocab_size, length=args.length)
        note(f"{len(texts)} answers from {kept}")
        return texts
    engine = make_engine(model, args)
    if args.prompts_file is not None:
        prompts = file_prompts(args, tokenizer)
    else:
        prompts = own_prompts(engine, model, tokenizer, args)
    note(f"{len(prompts)} prompts")
    texts = answer(engine, prompts, args.length)
    del engine
    gc.collect()  # and its cache
    if kept is not None:
        save_texts(kept, texts)
    return texts


def save_texts(path: Path, texts: Sequence[Text]) -> None:
    """Keep texts; the file appears whole or not at all."""
    lengths = np.array([(len(text.prompt), len(text.answer)) for text in texts], np.int32)
    ids = np.array([token for text in texts for token in (*text.prompt, *text.answer)], np.int32)
    scratch = path.with_suffix(".part.npz")
    np.savez_compressed(scratch, lengths=lengths, ids=ids)
    scratch.replace(path)


def read_texts(path: Path, *, vocab_size: int, length: int) -> list[Text]:
    """The texts of a file.

    Raises:
        SystemExit: If a token is outside the vocabulary, or a text is longer than `length`.
    """
    with np.load(path) as kept:
        lengths, ids = kept["lengths"], kept["ids"].tolist()
    if max(ids, default=0) >= vocab_size:
        sys.exit(f"{path} has the token {max(ids)}; the model has {vocab_size} tokens")
    if (longest := int(lengths.sum(axis=1).max(initial=0))) > length:
        sys.exit(f"{path} has a text of {longest} tokens; raise --length {length} to that")
    texts, at = [], 0
    for num_prompt, num_answer in lengths.tolist():
        middle, end = at + num_prompt, at + num_prompt + num_answer
        texts.append(Text(prompt=tuple(ids[at:middle]), answer=tuple(ids[middle:end])))
        at = end
    return texts


# The head -----------------------------------------------------------------------------------------


def new_head(model: LoadedModel, args: argparse.Namespace) -> HeadConfig:
    """A head whose layer has the sizes of the model's."""
    config = model.config
    num_drafted = min(args.draft_vocab_size or config.vocab_size, config.vocab_size)
    layers = tuple(args.layers) if args.layers else _layers_of(config.num_layers)
    layer = layer_like(config)
    if args.intermediate_size:
        layer = dataclasses.replace(layer, intermediate_size=args.intermediate_size)
    return HeadConfig(
        method=EAGLE3,
        layer=layer,
        feature_layers=layers,
        target_hidden_size=config.hidden_size,
        draft_vocab_size=num_drafted,
        norm_before_residual=False,
    )


def _layers_of(num_layers: int) -> tuple[int, ...]:
    """The published layers, or of a shallow model the first, the middle and the last."""
    if num_layers < 7:
        return 1, max(1, num_layers // 2), num_layers - 1
    return default_feature_layers(num_layers)


def frequent_tokens(texts: Sequence[Text], eagle: HeadConfig) -> np.ndarray:
    """The tokens that answers have most, ascending; others fill the draft vocabulary up."""
    counts = Counter(token for text in texts for token in text.answer)
    order = [token for token, _ in counts.most_common()]
    rest = (token for token in range(eagle.layer.vocab_size) if token not in counts)
    chosen = [*order, *rest][: eagle.draft_vocab_size]
    return np.sort(np.asarray(chosen, np.int32))


def first_tensors(model: LoadedModel, eagle: HeadConfig, ids: np.ndarray, seed: int) -> Tensors:
    """Random matrices; rows of the model's last matrix, and its last norm; the last features."""
    rng = np.random.default_rng(seed)
    tensors = {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else rng.standard_normal(shape, np.float32) * np.float32(0.5 * shape[1] ** -0.5)
        for name, shape in tensor_shapes(eagle).items()
    }
    width = eagle.layer.hidden_size
    rows = np.asarray(model.params["lm_head"][ids].astype(jnp.float32))
    tensors["lm_head.weight"] = rows
    tensors["norm.weight"] = np.asarray(model.params["final_norm"].astype(jnp.float32))
    tensors["fc.weight"] *= np.float32(0.1)
    tensors["fc.weight"][:, (NUM_FEATURES - 1) * width :] += np.eye(width, dtype=np.float32)
    return {name: jnp.asarray(value) for name, value in tensors.items()}


def _norm(x: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
    """Normalise in float32."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * gain.astype(jnp.float32)).astype(x.dtype)


def _turned(x: jax.Array, tables: tuple[jax.Array, jax.Array], shift: int) -> jax.Array:
    """Rotate [B, T, H, C], whose first token is at position `shift`."""
    cos, sin = (table[shift : shift + x.shape[1], None] for table in tables)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def _attention(q: jax.Array, keys: list[jax.Array], values: list[jax.Array]) -> jax.Array:
    """Attend over the entries of the text, and over the own drafts before, [B, T, H, C].

    A query of step i at place t sees all entries of step 0 up to t, and those of the steps behind
    it at place t alone.
    """
    length, scale, dtype = q.shape[1], q.shape[-1] ** -0.5, q.dtype
    group = q.shape[2] // keys[0].shape[2]
    keys, values = ([jnp.repeat(x, group, axis=2) for x in xs] for xs in (keys, values))
    wide = {"preferred_element_type": jnp.float32}
    of_text = jnp.einsum("bthc,bshc->bhts", q, keys[0], **wide) * scale
    of_text = jnp.where(jnp.tri(length, dtype=bool), of_text, -1e30)
    own = [jnp.einsum("bthc,bthc->bht", q, key, **wide)[..., None] * scale for key in keys[1:]]
    weights = jax.nn.softmax(jnp.concatenate([of_text, *own], axis=-1), axis=-1).astype(dtype)
    out = jnp.einsum("bhts,bshc->bthc", weights[..., :length], values[0])
    for i, value in enumerate(values[1:]):
        out = out + jnp.moveaxis(weights[..., length + i], 1, 2)[..., None] * value
    return out


def head_logits(
    eagle: HeadConfig,
    num_steps: int,
    tensors: Tensors,
    embed: jax.Array,
    tables: tuple[jax.Array, jax.Array],
    features: jax.Array,
    ids: jax.Array,
) -> Iterator[jax.Array]:
    """Give the logits of each of the head's own steps, [B, T, X]; place t of step i drafts t+2+i.

    Args:
        eagle: What the head is.
        num_steps: Drafts behind one place of the text.
        tensors: Of the head, all of the dtype that it computes in.
        embed: Of the model, [V, D].
        tables: Cosines and sines by position.
        features: [B, S, X].
        ids: [B, S].
    """
    params, eps = joined_params(tensors), eagle.layer.rms_norm_eps
    dtype, length = params["fc"].dtype, ids.shape[1] - num_steps - 1
    hidden = features[:, :length].astype(dtype) @ params["fc"].T
    keys, values = [], []
    for step in range(num_steps):
        embedded = embed[ids[:, step + 1 : step + 1 + length]].astype(dtype)
        normed = _norm(hidden, params["hidden_norm"], eps)
        rows = jnp.concatenate([_norm(embedded, params["embed_norm"], eps), normed], axis=-1)
        heads = (rows @ params["qkv"].T).reshape(*rows.shape[:2], -1, eagle.layer.head_dim)
        split = eagle.layer.num_heads, eagle.layer.num_heads + eagle.layer.num_kv_heads
        q, k, v = jnp.split(heads, split, axis=2)
        keys.append(_turned(k, tables, step))
        values.append(v)
        out = _attention(_turned(q, tables, step), keys, values)
        residual = hidden + out.reshape(*rows.shape[:2], -1) @ params["o"].T
        gate, up = jnp.split(_norm(residual, params["mlp_norm"], eps) @ params["gate_up"].T, 2, -1)
        hidden = residual + (jax.nn.silu(gate) * up) @ params["down"].T
        yield _norm(hidden, params["last_norm"], eps) @ params["lm_head"].T


def head_losses(
    logits_of_steps: Iterator[jax.Array], labels: jax.Array, wanted_logits: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy of each of the head's own steps, and the share of right drafts, [steps] each.

    Args:
        logits_of_steps: As `head_logits` gives them.
        labels: Row of `lm_head` of each token, [B, S]; -1 where it does not count.
        wanted_logits: The model's, [B, S, X]: the head learns their distribution. None: it learns
            the tokens.
    """
    losses, rights = [], []
    for step, logits in enumerate(logits_of_steps):
        logits = logits.astype(jnp.float32)
        there = slice(step + 2, step + 2 + logits.shape[1])
        wanted = labels[:, there]
        counts = wanted >= 0
        if wanted_logits is None:
            right = jnp.take_along_axis(logits, jnp.maximum(wanted, 0)[..., None], axis=-1)[..., 0]
        else:
            # The token at a place is of the logits of the place before.
            of_model = wanted_logits[:, step + 1 : step + 1 + logits.shape[1]]
            weights = jax.nn.softmax(of_model.astype(jnp.float32), axis=-1)
            right = jnp.sum(weights * logits, axis=-1)
        loss = jax.nn.logsumexp(logits, axis=-1) - right
        num = jnp.maximum(jnp.sum(counts), 1)
        losses.append(jnp.sum(loss * counts) / num)
        rights.append(jnp.sum((jnp.argmax(logits, axis=-1) == wanted) & counts) / num)
    return jnp.stack(losses), jnp.stack(rights)


# Training -----------------------------------------------------------------------------------------


def batches(
    texts: Sequence[Text], ids: np.ndarray, eagle: HeadConfig, args: argparse.Namespace
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Token ids and labels of random texts, for ever."""
    row_of = np.full(eagle.layer.vocab_size, -1, np.int32)
    row_of[ids] = np.arange(len(ids))
    rng = np.random.default_rng(args.seed)
    while True:
        tokens = np.zeros((args.batch_size, args.length), np.int32)
        labels = np.full((args.batch_size, args.length), -1, np.int32)
        for row, at in enumerate(rng.integers(0, len(texts), args.batch_size)):
            text = texts[at]
            both = (*text.prompt, *text.answer)
            tokens[row, : len(both)] = both
            start = len(text.prompt)
            labels[row, start : len(both)] = row_of[list(text.answer)]
        yield tokens, labels


def make_update(
    model: LoadedModel, eagle: HeadConfig, ids: np.ndarray, args: argparse.Namespace
) -> tuple[optax.GradientTransformation, Callable, Callable]:
    """The optimiser, its step, and what only measures.

    The step is `(tensors, state, texts) -> (tensors, state, loss, rights)`, whose texts have the
    rate of learning as well; the other is `(tensors, texts) -> (loss, rights)`.
    """
    layer = eagle.layer
    cos, sin = rope_tables(layer.rope, head_dim=layer.head_dim, max_len=args.length)
    tables = jnp.asarray(cos), jnp.asarray(sin)
    adam = optax.adamw(1.0, b2=0.95, weight_decay=args.weight_decay, mask=_is_matrix)
    optimiser = optax.chain(optax.clip_by_global_norm(0.5), adam)
    discounts = 0.8 ** jnp.arange(args.drafts)
    dtype = jnp.bfloat16 if model.backend.platform == "gpu" else jnp.float32
    softcap, rows = model.config.logits_softcap, model.params["lm_head"][ids].astype(dtype)

    def loss_of(tensors: Tensors, given: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        narrow = {name: value.astype(dtype) for name, value in tensors.items()}
        logits = head_logits(
            eagle, args.drafts, narrow, given["embed"], tables, given["features"], given["tokens"]
        )
        wanted = None
        if args.targets == "distribution":
            wanted = given["last"].astype(dtype) @ given["rows"].T
            wanted = wanted if softcap is None else softcap * jnp.tanh(wanted / softcap)
        losses, rights = head_losses(logits, given["labels"], wanted)
        return jnp.sum(losses * discounts), rights

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(tensors, state, given):
        (loss, rights), grads = jax.value_and_grad(loss_of, has_aux=True)(tensors, given)
        updates, state = optimiser.update(grads, state, tensors)
        updates = jax.tree.map(functools.partial(jnp.multiply, given["rate"]), updates)
        return optax.apply_updates(tensors, updates), state, loss, rights

    of_model = {"embed": model.params["embed"], "rows": rows}
    measured = jax.jit(loss_of)

    def step(tensors: Tensors, state: Any, given: dict) -> tuple:
        return update(tensors, state, given | of_model)

    def measure(tensors: Tensors, given: dict) -> tuple[jax.Array, jax.Array]:
        return measured(tensors, given | of_model)

    return optimiser, step, measure


def rate_of(args: argparse.Namespace, step: int, progress: float) -> np.float32:
    """The rate of learning: up in some steps, then down along a cosine."""
    warmth = min(1.0, step / min(100, args.steps // 10 + 1))
    return np.float32(args.learning_rate * warmth * (0.51 + 0.49 * np.cos(np.pi * progress)))


def _is_matrix(tensors: Tensors) -> dict[str, bool]:
    return {name: value.ndim > 1 for name, value in tensors.items()}


def train(
    model: LoadedModel,
    eagle: HeadConfig,
    ids: np.ndarray,
    texts: Sequence[Text],
    held_out: Sequence[Text],
    args: argparse.Namespace,
) -> Tensors:
    """Train until the steps or the seconds are over; tell what is right of texts held out."""
    states_of = text_states(model, eagle.feature_layers, (args.batch_size, args.length))
    optimiser, update, measure = make_update(model, eagle, ids, args)
    tensors = first_tensors(model, eagle, ids, args.seed)
    state = optimiser.init(tensors)
    begin_s, seconds, loss = time.perf_counter(), args.seconds, None
    columns = (*rich.progress.Progress.get_default_columns(), "{task.fields[told]}")
    with rich.progress.Progress(*columns, console=rich.console.Console(stderr=True)) as bar:
        task = bar.add_task("training", total=args.steps, told="")
        for step, (tokens, labels) in enumerate(batches(texts, ids, eagle, args), start=1):
            features, last = states_of(tokens)
            given = {"features": features, "last": last, "tokens": tokens, "labels": labels}
            # WHY: a step is only launched, so the clock would tell how long launches take.
            jax.block_until_ready(loss)
            spent_s = time.perf_counter() - begin_s if step > 1 else 0.0
            progress = min(1.0, max(step / args.steps, spent_s / seconds))
            given["rate"] = rate_of(args, step, progress)
            tensors, state, loss, rights = update(tensors, state, given)
            if step == 1:
                jax.block_until_ready(loss)
                note(f"the first step took {time.perf_counter() - begin_s:.0f} s, to be compiled")
                begin_s = time.perf_counter()
                seconds = max(1.0, min(seconds, args.end_by - (begin_s - _BEGIN_S)))
            is_over = progress == 1.0
            if step % 20 and not is_over:
                continue
            shares = " ".join(f"{float(share):.2f}" for share in rights)
            told = f"loss {float(loss):.2f}, right drafts {shares}"
            bar.update(task, completed=step, told=told)
            if step % 400 == 0 or is_over:
                note(f"{step} steps in {time.perf_counter() - begin_s:.0f} s, {told}")
            if is_over:
                break
    if not held_out:
        return tensors
    shares = []
    for tokens, labels in itertools.islice(batches(held_out, ids, eagle, args), 4):
        features, last = states_of(tokens)
        given = {"features": features, "last": last, "tokens": tokens, "labels": labels}
        shares.append(measure(tensors, given)[1])
    told = " ".join(f"{float(share):.2f}" for share in np.mean(shares, axis=0))
    note(f"of texts held out, right drafts {told}, each behind the right ones")
    return tensors


def evaluate(
    model: LoadedModel, prompts: Mapping[str, Sequence[tuple[int, ...]]], args: argparse.Namespace
) -> bool:
    """Print how the engine drafts with the head that was written; False if a bit differs."""
    head = load_eagle_head(str(args.out), model=model)
    speculative = SpeculativeConfig(
        method=EAGLE3, model=str(args.out), num_speculative_tokens=args.drafts, is_adaptive=False
    )
    asked = {name: answer_requests(some, args.length) for name, some in prompts.items()}
    sizes = sizes_of(model, args, args.held_out_batch)
    engines = []
    for options in ({}, speculative.engine_options()):
        config = choose_sizes(model, sizes | options, gpu_memory_utilization=0.3, draft_model=head)
        engine = Engine(model, config, draft_model=head if options else None)
        engine.compile(requests=[request for some in asked.values() for request in some])
        engines.append(engine)
    return all([_told(name, some, engines, args) for name, some in asked.items()])


def _told(
    name: str, asked: Sequence[Request], engines: Sequence[Engine], args: argparse.Namespace
) -> bool:
    """Print an engine without the head and one with it, in turn; False if a bit differs."""
    plain, made = (engine.generate(asked) for engine in engines)  # also warms up
    tokens = sum(len(done.token_ids) for done in made)
    before = engines[1].stats().drafts.get(EAGLE3, DraftCounts())
    rates: list[list[float]] = [[], []]
    for _ in range(args.rounds):
        for engine, of_engine in zip(engines, rates, strict=True):
            begin_s = time.perf_counter()
            engine.generate(asked)
            of_engine.append(tokens / (time.perf_counter() - begin_s))
    pairs = zip(plain, made, strict=True)
    different = sum(one.digest() != other.digest() for one, other in pairs)
    counts = engines[1].stats().drafts.get(EAGLE3, DraftCounts()).since(before)
    rate, head_rate = (statistics.median(of_engine) for of_engine in rates)
    print(
        f"{name}: {counts.acceptance:.3f} of drafts accepted, {counts.tokens_per_window:.2f} "
        f"tokens a window, {rate:.0f} tokens/s without and {head_rate:.0f} with the head "
        f"({head_rate / rate:.2f}) at batch {args.held_out_batch}, {different} of {len(asked)} "
        f"answers ({tokens} tokens) differ"
    )
    return different == 0


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a folder, an id or novels-6m")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the head")
    parser.add_argument("--prompts-file", type=Path, help="a prompt a line; none samples them")
    parser.add_argument(
        "--texts-file",
        type=Path,
        help=".npz of prompts and answers, read if it is there, else written",
    )
    parser.add_argument("--chat", action="store_true", help="prompts are turns of a user")
    parser.add_argument("--prompts", type=int, default=2048, help="at most so many")
    parser.add_argument("--prompt-length", type=int, default=48, help="of a sampled prompt, tokens")
    parser.add_argument("--length", type=int, default=512, help="of prompt and answer, in tokens")
    parser.add_argument("--drafts", type=int, default=4, help="steps that the head learns")
    parser.add_argument("--draft-vocab-size", type=int, default=32000)
    parser.add_argument("--layers", type=int, nargs=NUM_FEATURES, help="whose inputs it reads")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="of training, at most; behind the first step"
    )
    parser.add_argument(
        "--end-by",
        type=float,
        default=float("inf"),
        help="end training so many seconds behind the start of this program",
    )
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument(
        "--targets",
        choices=("distribution", "tokens"),
        default="distribution",
        help="what the head learns of each place",
    )
    parser.add_argument("--intermediate-size", type=int, help="of its layer; the model's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held-out", type=int, default=32, help="prompts to draft for at the end")
    parser.add_argument("--held-out-batch", type=int, default=8, help="of them at once")
    parser.add_argument("--rounds", type=int, default=3, help="timed runs at the end; the median")
    parser.add_argument(
        "--answer-batch", type=int, default=0, help="answers at once; 0: 8, or 512 on a GPU"
    )
    parser.add_argument(
        "--answer-steps",
        type=int,
        default=0,
        help="steps of a launch, also of the timed runs at the end; 0: 1, or 4 on a GPU",
    )
    parser.add_argument("--backend", default="auto")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Train and evaluate; 3 if a bit of an answer differs with the head."""
    args = make_parser().parse_args(argv)
    folder = find_model(args.model)
    tokenizer = Tokenizer.from_folder(folder)
    model, reason = load_on_devices(
        folder, profile=NumericsProfile(), backend=args.backend, dp=1, tp=1, max_len=args.length
    )
    note(f"{args.model}: {reason}")
    texts = make_texts(model, tokenizer, args)
    num_held_out = min(args.held_out, max(1, len(texts) // 10))
    held_out, texts = texts[:num_held_out], texts[num_held_out:]
    eagle = new_head(model, args)
    ids = frequent_tokens(texts, eagle)
    tensors = train(model, eagle, ids, texts, held_out, args)
    rounded = {name: np.asarray(value.astype(jnp.bfloat16)) for name, value in tensors.items()}
    save_eagle_head(args.out, eagle, rounded, ids)
    note(f"written to {args.out}")
    some = {"learned": texts[:num_held_out], "held out": held_out}
    drafted_for = {name: [text.prompt for text in of_name] for name, of_name in some.items()}
    return 0 if evaluate(model, drafted_for, args) else 3


if __name__ == "__main__":
    sys.exit(main())
