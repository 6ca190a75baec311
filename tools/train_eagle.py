# SPDX-License-Identifier: Apache-2.0
r"""Train an EAGLE-3 head for a model on the model's own greedy text.

    python tools/train_eagle.py --model FOLDER --out HEAD
    python tools/train_eagle.py --model FOLDER --out HEAD --chat --prompts-file prompts.txt
    python tools/train_eagle.py --model novels-6m --out HEAD --prompts 64 --steps 60 --batch-size 4

The model answers prompts greedily: lines of a file, or texts that it samples itself at
temperature 1 (of a chat model, questions behind the opening of a user's turn; Xu et al. 2024,
arXiv:2406.08464). The head learns the tokens of these answers over several steps of its own
(training-time test, Li et al. 2025, arXiv:2503.01840). Its last matrix begins as rows of the
model's. Some prompts are held out. At the end the engine drafts for them with the head
that was written, and prints the acceptance and whether a bit differs. `--out` has SGLang's form,
which `--speculative-config` reads.

This is a trainer, not the canonical path: its arithmetic makes no claim. Needs one device.
"""

import argparse
import dataclasses
import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich.progress

from detjax.engine.config import EAGLE3
from detjax.engine.engine import Engine
from detjax.engine.outputs.completion import Completion
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.speculative_config import SpeculativeConfig
from detjax.models.eagle.config import NUM_FEATURES, EagleConfig, default_feature_layers, layer_like
from detjax.models.eagle.features import text_features
from detjax.models.eagle.head import joined_params, load_eagle_head, tensor_shapes
from detjax.models.eagle.save import save_eagle_head
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
    sizes = sizes_of(model, args, 256 if model.backend.platform == "gpu" else 8)
    return Engine(model, choose_sizes(model, sizes, gpu_memory_utilization=0.6))


def sizes_of(model: LoadedModel, args: argparse.Namespace, batch: int) -> dict[str, Any]:
    """Sizes of an engine of so many sequences, with few programs and no larger cache than it needs.

    # WHY: with a cache that fills an H200 each program took 6 s to compile.
    """
    pages = -(-args.length // model.profile.attention_block)
    return {
        "max_len": args.length, "self_check": "off", "batch_size": batch, "decode_batches": (),
        "num_pages": batch * pages,
    }  # fmt: skip


def file_prompts(args: argparse.Namespace, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """The lines of a file, as prompts."""
    lines = args.prompts_file.read_text(encoding="utf-8").splitlines()
    texts = [line for line in lines if line.strip()][: args.prompts]
    if not args.chat:
        return [tuple(tokenizer.encode(text)) for text in texts]
    return [chat_prompt(tokenizer, text) for text in texts]


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
        return [(*opening, *done.token_ids) for done in made]
    texts = [tokenizer.decode(done.token_ids).strip() for done in made]
    return [chat_prompt(tokenizer, text) for text in texts if text]


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


# The head -----------------------------------------------------------------------------------------


def new_head(model: LoadedModel, args: argparse.Namespace) -> EagleConfig:
    """A head whose layer has the sizes of the model's."""
    config = model.config
    num_drafted = min(args.draft_vocab_size or config.vocab_size, config.vocab_size)
    layers = tuple(args.layers) if args.layers else _layers_of(config.num_layers)
    return EagleConfig(
        layer=layer_like(config),
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


def frequent_tokens(texts: Sequence[Text], eagle: EagleConfig) -> np.ndarray:
    """The tokens that answers have most, ascending; others fill the draft vocabulary up."""
    counts = Counter(token for text in texts for token in text.answer)
    order = [token for token, _ in counts.most_common()]
    rest = (token for token in range(eagle.layer.vocab_size) if token not in counts)
    chosen = [*order, *rest][: eagle.draft_vocab_size]
    return np.sort(np.asarray(chosen, np.int32))


def first_tensors(model: LoadedModel, eagle: EagleConfig, ids: np.ndarray, seed: int) -> Tensors:
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
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * gain


def _turned(x: jax.Array, tables: tuple[jax.Array, jax.Array], shift: int) -> jax.Array:
    """Rotate [B, T, H, C], whose first token is at position `shift`."""
    cos, sin = (table[shift : shift + x.shape[1], None] for table in tables)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _attention(q: jax.Array, keys: list[jax.Array], values: list[jax.Array]) -> jax.Array:
    """Attend over the entries of the text, and over the own drafts before, [B, T, H, C].

    A query of step i at place t sees all entries of step 0 up to t, and those of the steps behind
    it at place t alone.
    """
    length, scale = q.shape[1], q.shape[-1] ** -0.5
    group = q.shape[2] // keys[0].shape[2]
    keys, values = ([jnp.repeat(x, group, axis=2) for x in xs] for xs in (keys, values))
    of_text = jnp.einsum("bthc,bshc->bhts", q, keys[0]) * scale
    of_text = jnp.where(jnp.tri(length, dtype=bool), of_text, -1e30)
    own = [jnp.einsum("bthc,bthc->bht", q, key)[..., None] * scale for key in keys[1:]]
    weights = jax.nn.softmax(jnp.concatenate([of_text, *own], axis=-1), axis=-1)
    out = jnp.einsum("bhts,bshc->bthc", weights[..., :length], values[0])
    for i, value in enumerate(values[1:]):
        out = out + jnp.moveaxis(weights[..., length + i], 1, 2)[..., None] * value
    return out


def head_losses(
    eagle: EagleConfig,
    num_steps: int,
    tensors: Tensors,
    embed: jax.Array,
    tables: tuple[jax.Array, jax.Array],
    features: jax.Array,
    ids: jax.Array,
    labels: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy of each of the head's own steps, and the share of right drafts, [steps] each.

    Args:
        eagle: What the head is.
        num_steps: Drafts behind one place of the text.
        tensors: Of the head, float32.
        embed: Of the model, [V, D].
        tables: Cosines and sines by position.
        features: [B, S, X].
        ids: [B, S].
        labels: Row of `lm_head` of each token, [B, S]; -1 where it does not count.
    """
    params, eps = joined_params(tensors), eagle.layer.rms_norm_eps
    length = ids.shape[1] - num_steps - 1
    hidden = features[:, :length].astype(jnp.float32) @ params["fc"].T
    keys, values, losses, rights = [], [], [], []
    for step in range(num_steps):
        embedded = embed[ids[:, step + 1 : step + 1 + length]].astype(jnp.float32)
        normed = _norm(hidden, params["hidden_norm"], eps)
        rows = jnp.concatenate([_norm(embedded, params["attn_norm"], eps), normed], axis=-1)
        heads = (rows @ params["qkv"].T).reshape(*rows.shape[:2], -1, eagle.layer.head_dim)
        split = eagle.layer.num_heads, eagle.layer.num_heads + eagle.layer.num_kv_heads
        q, k, v = jnp.split(heads, split, axis=2)
        keys.append(_turned(k, tables, step))
        values.append(v)
        out = _attention(_turned(q, tables, step), keys, values)
        residual = hidden + out.reshape(*rows.shape[:2], -1) @ params["o"].T
        gate, up = jnp.split(_norm(residual, params["mlp_norm"], eps) @ params["gate_up"].T, 2, -1)
        hidden = residual + (jax.nn.silu(gate) * up) @ params["down"].T
        logits = _norm(hidden, params["final_norm"], eps) @ params["lm_head"].T
        wanted = labels[:, step + 2 : step + 2 + length]
        counts = wanted >= 0
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(wanted, 0))
        num = jnp.maximum(jnp.sum(counts), 1)
        losses.append(jnp.sum(loss * counts) / num)
        rights.append(jnp.sum((jnp.argmax(logits, axis=-1) == wanted) & counts) / num)
    return jnp.stack(losses), jnp.stack(rights)


# Training -----------------------------------------------------------------------------------------


def batches(
    texts: Sequence[Text], ids: np.ndarray, eagle: EagleConfig, args: argparse.Namespace
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


def train(
    model: LoadedModel,
    eagle: EagleConfig,
    ids: np.ndarray,
    texts: Sequence[Text],
    args: argparse.Namespace,
) -> Tensors:
    """Train until the steps or the seconds are over."""
    tensors = first_tensors(model, eagle, ids, args.seed)
    features_of = text_features(model, eagle.feature_layers, (args.batch_size, args.length))
    layer = eagle.layer
    tables = rope_tables(layer.rope, head_dim=layer.head_dim, max_len=args.length)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, args.learning_rate, min(50, args.steps // 10 + 1), args.steps, args.learning_rate / 20
    )
    optimiser = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(schedule, b2=0.95))
    state = optimiser.init(tensors)
    discounts = 0.8 ** jnp.arange(args.drafts)

    @jax.jit
    def update(tensors, state, embed, tables, features, tokens, labels):
        def loss_of(tensors):
            losses, rights = head_losses(
                eagle, args.drafts, tensors, embed, tables, features, tokens, labels
            )
            return jnp.sum(losses * discounts), rights

        (loss, rights), grads = jax.value_and_grad(loss_of, has_aux=True)(tensors)
        updates, state = optimiser.update(grads, state, tensors)
        return optax.apply_updates(tensors, updates), state, loss, rights

    begin_s = time.perf_counter()
    columns = (*rich.progress.Progress.get_default_columns(), "{task.fields[told]}")
    with rich.progress.Progress(*columns, console=rich.console.Console(stderr=True)) as bar:
        task = bar.add_task("training", total=args.steps, told="")
        for step, (tokens, labels) in enumerate(batches(texts, ids, eagle, args), start=1):
            tensors, state, loss, rights = update(
                tensors, state, model.params["embed"], tables, features_of(tokens),
                tokens, labels,
            )  # fmt: skip
            if step == 1:
                jax.block_until_ready(loss)
                note(f"the first step took {time.perf_counter() - begin_s:.0f} s, to be compiled")
                begin_s = time.perf_counter()
            is_over = step == args.steps or time.perf_counter() - begin_s > args.seconds
            if step % 20 and not is_over:
                continue
            shares = " ".join(f"{float(share):.2f}" for share in rights)
            told = f"loss {float(loss):.2f}, right drafts {shares}"
            bar.update(task, completed=step, told=told)
            if is_over:
                note(f"{step} steps in {time.perf_counter() - begin_s:.0f} s, {told}")
                return tensors
    raise AssertionError("batches never end")


def evaluate(
    model: LoadedModel, prompts: Sequence[tuple[int, ...]], args: argparse.Namespace
) -> bool:
    """Print how the engine drafts with the head that was written; False if a bit differs."""
    head = load_eagle_head(str(args.out), model=model)
    speculative = SpeculativeConfig(
        method=EAGLE3, model=str(args.out), num_speculative_tokens=args.drafts, is_adaptive=False
    )
    asked = answer_requests(prompts, args.length)
    sizes = sizes_of(model, args, args.held_out_batch)
    found, rates = [], []
    for options in ({}, speculative.engine_options()):
        config = choose_sizes(model, sizes | options, gpu_memory_utilization=0.6, draft_model=head)
        engine = Engine(model, config, draft_model=head)
        engine.compile(requests=asked)
        engine.generate(asked[:2])
        begin_s = time.perf_counter()
        made = engine.generate(asked)
        count = sum(len(done.token_ids) for done in made)
        rates.append(count / (time.perf_counter() - begin_s))
        found.append([done.digest() for done in made])
    counts = engine.stats().drafts[EAGLE3]
    different = sum(one != other for one, other in zip(*found, strict=True))
    print(
        f"held out: {counts.acceptance:.3f} of drafts accepted, {counts.tokens_per_window:.2f} "
        f"tokens a window, {rates[0]:.0f} tokens/s without and {rates[1]:.0f} with the head at "
        f"batch {args.held_out_batch}, {different} of {len(asked)} answers ({count} tokens) differ"
    )
    return not different


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a folder, an id or novels-6m")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the head")
    parser.add_argument("--prompts-file", type=Path, help="a prompt a line; none samples them")
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
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held-out", type=int, default=32, help="prompts to draft for at the end")
    parser.add_argument("--held-out-batch", type=int, default=8, help="of them at once")
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
    engine = make_engine(model, args)
    if args.prompts_file is not None:
        prompts = file_prompts(args, tokenizer)
    else:
        prompts = own_prompts(engine, model, tokenizer, args)
    note(f"{len(prompts)} prompts")
    num_held_out = min(args.held_out, max(1, len(prompts) // 10))
    texts = answer(engine, prompts[num_held_out:], args.length)
    del engine
    gc.collect()  # and its cache
    eagle = new_head(model, args)
    ids = frequent_tokens(texts, eagle)
    tensors = train(model, eagle, ids, texts, args)
    rounded = {name: np.asarray(value.astype(jnp.bfloat16)) for name, value in tensors.items()}
    save_eagle_head(args.out, eagle, rounded, ids)
    note(f"written to {args.out}")
    return 0 if evaluate(model, prompts[:num_held_out], args) else 3


if __name__ == "__main__":
    sys.exit(main())
