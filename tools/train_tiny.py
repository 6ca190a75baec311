# SPDX-License-Identifier: Apache-2.0
r"""Train the small Llama that detjax ships for tests and demonstrations.

One file from text to a Hugging Face folder: a byte-level BPE tokenizer, a 5.6M-parameter Llama
trained on novels with a tenth of generated sums, a held-out evaluation, and a model card written
from the numbers measured here. Minutes on one data-centre GPU:

    python tools/train_tiny.py --corpus novels.txt.gz --out novels-6m

larger ones, at a lower rate, for experiments on nondeterminism and on drafts (500m is wide and
shallow, so that reading its weights is what a decode step costs):

    python tools/train_tiny.py --corpus novels.txt.gz --size 100m --learning-rate 6e-4 \
        --out novels-100m
    python tools/train_tiny.py --corpus novels.txt.gz --size 500m --learning-rate 4e-4 \
        --steps 300 --batch-size 32 --dropout 0 --out novels-500m

one whose feed-forward layers are mixtures of 8 experts, 2 of a token, for experiments on routing
(as many active parameters as the first, under Mixtral's names):

    python tools/train_tiny.py --corpus novels.txt.gz --size moe --out novels-moe

one that counts in steps too, so that it has long answers and gets some of them right, in two
minutes of wall time:

    python tools/train_tiny.py --corpus novels.txt.gz --size 130m --learning-rate 1e-3 \
        --seconds 120 --batch-size 16 --eval-every 100 --dropout 0 --sum-lines 600000 \
        --sum-share 0.5 --sum-target 1.1 --count-share 0.2 --out novels-130m

one of the same size that the bundled model can draft for, as both have one tokenizer:

    python tools/train_tiny.py --corpus novels.txt.gz --size 130m --learning-rate 1e-3 \
        --tokenizer detjax/models/bundled/novels-6m --seconds 120 --batch-size 16 \
        --eval-every 100 --dropout 0 --out novels-130m

and a trial of a few minutes on a laptop, which learns next to nothing:

    python tools/train_tiny.py --corpus novels.txt.gz --out trial --steps 20 --batch-size 4

This is a trainer, not the canonical path: its arithmetic is plain `jax.numpy` and makes no claim.
Weights live under their Hugging Face names, in their (out, in) layout, from the first step on.
"""

import argparse
import gzip
import hashlib
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

type Params = dict[str, jax.Array]
type Report = dict[str, float]

BOS, EOS = "<|bos|>", "<|eos|>"
BOS_ID, EOS_ID = 0, 1
TEMPLATE = Path(__file__).parents[1] / "detjax/models/bundled/novels-6m/chat_template.jinja"
SUM_LEN = 16  # tokens of one padded `<|bos|>17+26=43\n`; three-digit sums fit

# What --corpus was for the model that ships. Training on another text means writing another one.
CORPUS_TEXT = """\
41 English novels first published by 1929, all in the public domain, as collected in
computationalstylistics/100_english_novels: *Clara Vaughan*, *Erema*, *Lorna Doone*, *Springhaven*
(R. D. Blackmore); *The White Ladies of Worcester*, *Through the Postern Gate*, *The Rosary*
(Florence L. Barclay); *The Grand Babylon Hotel*, *Helen with the High Hand* (Arnold Bennett);
*Lady Audley's Secret*, *Phantom Fortune*, *Fenton's Quest* (M. E. Braddon); *The Secret Garden*,
*Little Lord Fauntleroy*, *A Little Princess* (Frances Hodgson Burnett); *Jane Eyre*, *Shirley*,
*Villette* (Charlotte Brontë); *The Innocence of Father Brown*, *The Napoleon of Notting Hill*,
*The Man Who Was Thursday* (G. K. Chesterton); *Almayer's Folly*, *Nostromo*, *The Rover* (Joseph
Conrad); *Innocent*, *A Romance of Two Worlds*, *The Sorrows of Satan* (Marie Corelli); *Bleak
House*, *Great Expectations*, *Oliver Twist* (Charles Dickens); *The Hound of the Baskervilles*,
*The Lost World*, *Micah Clarke* (Arthur Conan Doyle); *Adam Bede*, *Daniel Deronda*, *Felix Holt*
(George Eliot); *An English Girl*, *Last Post*, *The Good Soldier* (Ford Madox Ford); *Where Angels
Fear to Tread*, *Howards End* (E. M. Forster)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Dimensions of the model, under the keys of a Hugging Face `config.json`."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 5
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    num_local_experts: int = 0
    num_experts_per_tok: int = 0


SIZES = {
    "6m": ModelConfig(),
    "moe": ModelConfig(intermediate_size=384, num_local_experts=8, num_experts_per_tok=2),
    "100m": ModelConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=16,
        num_attention_heads=12,
        num_key_value_heads=4,
    ),
    "130m": ModelConfig(  # wide and shallow, so that a step is long products
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
    ),
    "500m": ModelConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
    ),
}


# Text -------------------------------------------------------------------------------------------


def read_text(path: Path) -> str:
    """Read a .txt or .txt.gz file as UTF-8."""
    raw = path.read_bytes()
    return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")


def clean_lines(text: str) -> list[str]:
    """Give one line a paragraph, with plain quotes and single spaces, and no empty lines."""
    text = text.translate(str.maketrans("“”‘’\t\x0c\xa0", "\"\"''   "))
    lines = [re.sub(" +", " ", line).strip() for line in text.split("\n")]
    return [
        paragraph
        for start in range(0, len(lines), 100)
        for paragraph in unwrap(lines[start : start + 100])
    ]


def unwrap(lines: list[str]) -> Iterator[str]:
    """Join the lines of each paragraph where the text is wrapped at a fixed width.

    A line goes on into the next one when it is nearly as long as its neighbourhood's lines are
    and does not end a speech. Where many lines are very long each is a paragraph already.
    """
    lengths = [len(line) for line in lines if line] or [0]
    is_wrapped = sum(length > 120 for length in lengths) < 0.05 * len(lengths)
    full_line = 0.8 * statistics.median(lengths)
    paragraph = ""
    for line in lines:
        ends_before = not line or (line[0] in "\"'" and paragraph[-1:] in list(".!?\"'"))
        if paragraph and ends_before:
            yield paragraph
            paragraph = ""
        paragraph = f"{paragraph} {line}".strip()
        if paragraph and not (is_wrapped and len(line) >= full_line):
            yield paragraph
            paragraph = ""
    if paragraph:
        yield paragraph


def split_documents(lines: list[str]) -> list[str]:
    """Cut the text into chapters; a heading right after another stays in the same document."""
    heading = re.compile(r"(chapter|book|part)\b.{0,80}$", re.IGNORECASE)
    documents, current, size = [], [], 0
    for line in lines:
        if size > 2000 and heading.match(line):
            documents.append("\n".join(current) + "\n")
            current, size = [], 0
        current.append(line)
        size += len(line) + 1
    return [*documents, "\n".join(current) + "\n"]


def split_heldout(lines: list[str], title: str) -> tuple[list[str], list[str]]:
    """Hold out everything from the line `title` on, or the last 2 % where no such line is."""
    cut = lines.index(title) if title in lines else int(0.98 * len(lines))
    return lines[:cut], lines[cut:]


# Sums -------------------------------------------------------------------------------------------


class Sum(NamedTuple):
    """One line of arithmetic, `left op right = answer`, never negative."""

    left: int
    op: str
    right: int

    @property
    def prompt(self) -> str:
        """The line up to and with the equals sign."""
        return f"{self.left}{self.op}{self.right}="

    @property
    def line(self) -> str:
        """The whole line with its newline."""
        answer = self.left + self.right if self.op == "+" else self.left - self.right
        return f"{self.prompt}{answer}\n"


def two_digit_sums(op: str, rng: np.random.Generator) -> list[list[Sum]]:
    """List every pair of two-digit numbers in random order; a+b and b+a are one entry."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, a + 1)]
    ordered = [pairs[i] for i in rng.permutation(len(pairs))]
    if op == "-":
        return [[Sum(a, op, b)] for a, b in ordered]
    return [[Sum(a, op, b), Sum(b, op, a)] if a != b else [Sum(a, op, b)] for a, b in ordered]


@dataclass(frozen=True, kw_only=True, slots=True)
class SumSplit:
    """Two-digit sums no training line shows, a tenth of all, and some that training shows."""

    control: list[Sum]  # unseen additions that steer how many sums are trained on
    test_add: list[Sum]
    test_sub: list[Sum]
    seen_add: list[Sum]

    @property
    def unseen(self) -> frozenset[Sum]:
        """Every sum that training must not show."""
        return frozenset(self.control) | frozenset(self.test_add) | frozenset(self.test_sub)


def split_sums(seed: int) -> SumSplit:
    """Draw the unseen sums: 5 % of the additions steer, 5 % test; 10 % of the subtractions test."""
    rng = np.random.default_rng([seed, 1])
    add, sub = two_digit_sums("+", rng), two_digit_sums("-", rng)
    tenth = len(add) // 10
    return SumSplit(
        control=sum(add[: tenth // 2], []),
        test_add=sum(add[tenth // 2 : tenth], []),
        test_sub=sum(sub[:tenth], []),
        seen_add=sum(add[tenth : tenth + tenth // 2], []),
    )


def sum_documents(num_lines: int, unseen: frozenset[Sum], seed: int) -> list[str]:
    """Write documents of 4 to 12 random sums; six in ten have two two-digit numbers."""
    rng = np.random.default_rng([seed, 2])
    sizes = np.array([[2, 2], [1, 1], [1, 2], [2, 1], [3, 2], [2, 3], [3, 3]])
    size = sizes[rng.choice(7, num_lines, p=[0.6, 0.1, 0.08, 0.07, 0.05, 0.05, 0.05])]
    low, high = np.where(size == 1, 0, 10 ** (size - 1)), 10**size
    numbers = rng.integers(low, high)
    is_add = rng.random(num_lines) < 0.65
    sums = [
        Sum(int(a), "+", int(b)) if add else Sum(int(max(a, b)), "-", int(min(a, b)))
        for (a, b), add in zip(numbers, is_add, strict=True)
    ]
    lines = [one.line for one in sums if one not in unseen]
    documents, start = [], 0
    while start < len(lines):
        count = int(rng.integers(4, 13))
        documents.append("".join(lines[start : start + count]))
        start += count
    return documents


class Count(NamedTuple):
    """A line that counts in steps until a number has one more digit: `955,+17:972,989,1006`."""

    start: int
    step: int
    bound: int  # 10 ** digits

    @property
    def num_terms(self) -> int:
        """Numbers after the colon."""
        return -(-(self.bound - self.start) // self.step)

    @property
    def is_unseen(self) -> bool:
        """Whether training must not show it: every tenth."""
        return (7 * self.start + self.step) % 10 == 0

    @property
    def line(self) -> str:
        """The whole line with its newline."""
        terms = (str(self.start + (i + 1) * self.step) for i in range(self.num_terms))
        return f"{self.start},+{self.step}:{','.join(terms)}\n"


MAX_TERMS = 64


def count_documents(num_lines: int, seed: int) -> list[str]:
    """Write documents of 3 lines that count: three digits in steps of two, four in steps of three.

    At most `MAX_TERMS` numbers a line.
    """
    rng = np.random.default_rng([seed, 3])
    digits = rng.integers(3, 5, num_lines)
    bounds, most = 10**digits, 10 ** (digits - 1)
    steps = rng.integers(most // 10 + 1, most)
    starts = rng.integers(np.maximum(most // 10, bounds - MAX_TERMS * steps), bounds)
    counts = [Count(int(a), int(b), int(c)) for a, b, c in zip(starts, steps, bounds, strict=True)]
    lines = [one.line for one in counts if not one.is_unseen]
    return ["".join(lines[i : i + 3]) for i in range(0, len(lines), 3)]


def sum_rows(sums: list[Sum], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Encode sums as rows [N, SUM_LEN] and mark the tokens of the answer and its newline."""
    tokens = np.zeros((len(sums), SUM_LEN), np.int32)
    is_answer = np.zeros((len(sums), SUM_LEN), bool)
    for row, one in enumerate(sums):
        ids = tokenizer.encode(one.line).ids
        tokens[row, : len(ids)] = ids
        is_answer[row, len(tokenizer.encode(one.prompt).ids) : len(ids)] = True
    return tokens, is_answer


# Tokens -----------------------------------------------------------------------------------------


def train_tokenizer(documents: list[str], vocab_size: int) -> Tokenizer:
    """Train byte-level BPE in which every digit is a token and `<|bos|>` opens each text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def encode_stream(documents: list[str], tokenizer: Tokenizer) -> np.ndarray:
    """Encode documents as one stream, `<|bos|> text <|eos|>` each."""
    pieces = []
    for start in range(0, len(documents), 256):
        for one in tokenizer.encode_batch(documents[start : start + 256]):
            pieces += [np.array(one.ids, np.uint16), np.array([EOS_ID], np.uint16)]
    return np.concatenate(pieces)


class Data(NamedTuple):
    """Token streams and what is needed to read them."""

    novels: np.ndarray  # [N] uint16
    sums: np.ndarray  # [N] uint16
    heldout: np.ndarray  # [N] uint16
    heldout_num_bytes: int
    heldout_text: str  # what was held out, in words


def prepare_data(args: argparse.Namespace, config: ModelConfig) -> tuple[Tokenizer, Data]:
    """Train or read the tokenizer and encode everything, or take both from the cache folder."""
    settings = f"{config.vocab_size} {args.seed} {args.sum_lines} {args.heldout_title}"
    settings += f" {args.count_share}" if args.count_share else ""
    given = (args.tokenizer / "tokenizer.json").read_bytes() if args.tokenizer else b""
    digest = hashlib.sha256(args.corpus.read_bytes() + settings.encode() + given).hexdigest()[:16]
    tokenizer_file = args.cache / f"{digest}.tokenizer.json"
    data_file = args.cache / f"{digest}.npz"
    if data_file.exists():
        note(f"tokens from {data_file}")
        with np.load(data_file) as arrays:
            fields = {k: v if v.ndim else v.item() for k, v in arrays.items()}
        return Tokenizer.from_file(str(tokenizer_file)), Data(**fields)
    lines = clean_lines(read_text(args.corpus))
    train_lines, heldout_lines = split_heldout(lines, args.heldout_title)
    novels, heldout = split_documents(train_lines), split_documents(heldout_lines)
    num_counts = round(args.count_share * args.sum_lines)
    sums = sum_documents(args.sum_lines - num_counts, split_sums(args.seed).unseen, args.seed)
    if num_counts:
        counted = [*sums, *count_documents(num_counts, args.seed)]
        order = np.random.default_rng([args.seed, 4]).permutation(len(counted))
        sums = [counted[i] for i in order]
    note(f"{len(novels)} chapters, {len(sums)} documents of sums")
    if given:
        tokenizer = Tokenizer.from_str(given.decode())
        if tokenizer.get_vocab_size() != config.vocab_size:
            sys.exit(
                f"--tokenizer {args.tokenizer} has {tokenizer.get_vocab_size()} tokens; a model "
                f"of this size has {config.vocab_size}"
            )
    else:
        tokenizer = train_tokenizer([*novels, *sums[:2000]], config.vocab_size)
    data = Data(
        novels=encode_stream(novels, tokenizer),
        sums=encode_stream(sums, tokenizer),
        heldout=encode_stream(heldout, tokenizer),
        heldout_num_bytes=sum(len(one.encode()) for one in heldout),
        heldout_text=f'the novel "{args.heldout_title}"'
        if args.heldout_title in lines
        else "the last 2 % of the text",
    )
    args.cache.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(tokenizer_file))
    np.savez_compressed(data_file, **data._asdict())
    return tokenizer, data


def line_starts(stream: np.ndarray, newline_id: int, window: int) -> np.ndarray:
    """List the positions that begin a line or document and have a whole window after them."""
    opens_line = (stream[:-1] == newline_id) | (stream[:-1] == BOS_ID)
    starts = np.flatnonzero(opens_line) + 1
    return starts[starts <= len(stream) - window].astype(np.int32)


def heldout_windows(stream: np.ndarray, window: int) -> np.ndarray:
    """Cut the stream, without its first `<|bos|>`, into rows [N, window] padded with `<|bos|>`."""
    body = stream[1:].astype(np.int32)
    return np.pad(body, (0, -len(body) % window), constant_values=BOS_ID).reshape(-1, window)


# Model ------------------------------------------------------------------------------------------


def init_params(config: ModelConfig, key: jax.Array) -> Params:
    """Draw f32 weights; the two projections into the residual stream start smaller."""
    width, head_dim = config.hidden_size, config.head_dim
    q_width, kv_width = (
        count * head_dim for count in (config.num_attention_heads, config.num_key_value_heads)
    )
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, width)}
    for layer in range(config.num_hidden_layers):
        name = f"model.layers.{layer}"
        shapes |= {
            f"{name}.input_layernorm.weight": (width,),
            f"{name}.self_attn.q_proj.weight": (q_width, width),
            f"{name}.self_attn.k_proj.weight": (kv_width, width),
            f"{name}.self_attn.v_proj.weight": (kv_width, width),
            f"{name}.self_attn.o_proj.weight": (width, q_width),
            f"{name}.post_attention_layernorm.weight": (width,),
        }
        inner, experts = config.intermediate_size, config.num_local_experts
        if experts:  # those of a layer as one array; `checkpoint_tensors` cuts them apart
            shapes |= {
                f"{name}.block_sparse_moe.gate.weight": (experts, width),
                f"{name}.block_sparse_moe.experts.w1.weight": (experts, inner, width),
                f"{name}.block_sparse_moe.experts.w3.weight": (experts, inner, width),
                f"{name}.block_sparse_moe.experts.w2.weight": (experts, width, inner),
            }
        else:
            shapes |= {
                f"{name}.mlp.gate_proj.weight": (inner, width),
                f"{name}.mlp.up_proj.weight": (inner, width),
                f"{name}.mlp.down_proj.weight": (width, inner),
            }
    shapes["model.norm.weight"] = (width,)
    params = {}
    for idx, (name, shape) in enumerate(shapes.items()):
        scale = config.initializer_range
        if name.endswith(("o_proj.weight", "down_proj.weight", "w2.weight")):
            scale /= (2 * config.num_hidden_layers) ** 0.5
        params[name] = (
            jnp.ones(shape)
            if len(shape) == 1
            else scale * jax.random.normal(jax.random.fold_in(key, idx), shape)
        )
    return params


def rms_norm(x: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
    """Divide each row by its root mean square, in f32, and give back `x`'s dtype."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale * gain).astype(x.dtype)


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """Apply rotary positions to [B, T, H, C], halves paired as Hugging Face pairs them, in f32."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] * theta ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return turned.astype(x.dtype)


def drop(x: jax.Array, key: jax.Array, rate: float) -> jax.Array:
    """Zero a share of the entries and scale up the rest."""
    if rate == 0.0:
        return x
    return jnp.where(jax.random.bernoulli(key, 1.0 - rate, x.shape), x / (1.0 - rate), 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """The model as a function from weights and tokens [B, T] to f32 logits [B, T, V]."""

    config: ModelConfig
    dtype: str  # of the matrix products and the residual stream
    attention: str  # "cudnn" or "xla", as jax.nn.dot_product_attention names them

    def __call__(
        self, params: Params, tokens: jax.Array, *, key: jax.Array, dropout: float
    ) -> jax.Array:
        """Run the whole model; `key` is used only where `dropout` is positive."""
        return self.with_slots(params, tokens, key=key, dropout=dropout)[0]

    def with_slots(
        self, params: Params, tokens: jax.Array, *, key: jax.Array, dropout: float
    ) -> tuple[jax.Array, list[tuple[jax.Array, jax.Array]]]:
        """The logits, and what each layer's router gave: chosen and probable [B, T, experts]."""
        config, routed = self.config, []
        weights = {k: v.astype(self.dtype) if v.ndim > 1 else v for k, v in params.items()}
        keys = jax.random.split(key, (config.num_hidden_layers + 1, 2))
        x = drop(weights["model.embed_tokens.weight"][tokens], keys[-1, 0], dropout)
        for layer in range(config.num_hidden_layers):
            own = {
                k.split(".", 3)[3].removesuffix(".weight"): v
                for k, v in weights.items()
                if k.startswith(f"model.layers.{layer}.")
            }
            normed = rms_norm(x, own["input_layernorm"], config.rms_norm_eps)
            x += drop(self.attend(own, normed), keys[layer, 0], dropout)
            normed = rms_norm(x, own["post_attention_layernorm"], config.rms_norm_eps)
            if config.num_local_experts:
                added, slots = self.mix_experts(own, normed)
                routed.append(slots)
            else:
                gate, up = (normed @ own[f"mlp.{name}_proj"].T for name in ("gate", "up"))
                added = (jax.nn.silu(gate) * up) @ own["mlp.down_proj"].T
            x += drop(added, keys[layer, 1], dropout)
        x = rms_norm(x, weights["model.norm.weight"], config.rms_norm_eps)
        logits = jnp.einsum(
            "BTD,VD->BTV",
            x,
            weights["model.embed_tokens.weight"],
            preferred_element_type=jnp.float32,
        )
        return logits, routed

    def mix_experts(
        self, own: Params, x: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Every token through every expert, weighted by 0 where it was not chosen."""
        w1, w3, w2 = (own[f"block_sparse_moe.experts.{name}"] for name in ("w1", "w3", "w2"))
        logits = jnp.einsum(
            "BTD,ED->BTE", x, own["block_sparse_moe.gate"], preferred_element_type=jnp.float32
        )
        probable = jax.nn.softmax(logits, axis=-1)
        _, ids = jax.lax.top_k(probable, self.config.num_experts_per_tok)
        chosen = jax.nn.one_hot(ids, self.config.num_local_experts).sum(axis=2)
        share = probable * chosen
        share /= share.sum(axis=-1, keepdims=True)
        gate, up = (jnp.einsum("BTD,EFD->BTEF", x, w) for w in (w1, w3))
        gated = jax.nn.silu(gate) * up * share[..., None].astype(x.dtype)
        return jnp.einsum("BTEF,EDF->BTD", gated, w2), (chosen, probable)

    def attend(self, own: Params, x: jax.Array) -> jax.Array:
        """Causal grouped-query attention over [B, T, D]."""
        q, k, v = (
            (x @ own[f"self_attn.{name}_proj"].T).reshape(*x.shape[:2], -1, self.config.head_dim)
            for name in "qkv"
        )
        theta = self.config.rope_theta
        mixed = jax.nn.dot_product_attention(
            rotate(q, theta),
            rotate(k, theta),
            v,
            is_causal=True,
            implementation="cudnn" if self.attention == "cudnn" else "xla",
        )
        return mixed.reshape(*x.shape[:2], -1) @ own["self_attn.o_proj"].T


def token_losses(
    forward: Forward, params: Params, targets: jax.Array, *, key: jax.Array, dropout: float
) -> tuple[jax.Array, jax.Array]:
    """Negative log-likelihood [B, T] of rows that `<|bos|>` opens; 0 where the target is one.

    And how often each layer's router chose each expert, and found it probable: [layers, 2, experts]
    of means over tokens, or nothing.
    """
    inputs = jnp.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=BOS_ID)
    logits, routed = forward.with_slots(params, inputs, key=key, dropout=dropout)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    means = [jnp.stack([x.mean(axis=(0, 1)) for x in slots]) for slots in routed]
    return jnp.where(targets == BOS_ID, 0.0, losses), jnp.stack(means) if means else jnp.zeros(0)


# Training ---------------------------------------------------------------------------------------


class TrainState(NamedTuple):
    """Everything a step changes."""

    params: Params
    moments: optax.OptState
    step: jax.Array


class DeviceData(NamedTuple):
    """The two streams laid end to end on the device, and where lines begin in each."""

    stream: jax.Array  # [N] uint16
    novel_starts: jax.Array
    sum_starts: jax.Array


def to_device(data: Data, newline_id: int, window: int) -> DeviceData:
    """Move the token streams to the device."""
    starts = [line_starts(one, newline_id, window) for one in (data.novels, data.sums)]
    return DeviceData(
        stream=jnp.concatenate([jnp.asarray(data.novels), jnp.asarray(data.sums)]),
        novel_starts=jnp.asarray(starts[0]),
        sum_starts=jnp.asarray(starts[1] + len(data.novels)),
    )


def draw_batch(
    data: DeviceData, key: jax.Array, batch_size: int, window: int, sum_share: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Draw rows [B, T] that begin at random lines, and which of them [B] are sums."""
    novel_key, sum_key, kind_key = jax.random.split(key, 3)
    is_sum = jax.random.bernoulli(kind_key, sum_share, (batch_size,))
    novel_start = jax.random.choice(novel_key, data.novel_starts, (batch_size,))
    sum_start = jax.random.choice(sum_key, data.sum_starts, (batch_size,))
    start = jnp.where(is_sum, sum_start, novel_start)
    return data.stream[start[:, None] + jnp.arange(window)].astype(jnp.int32), is_sum


def make_optimizer(weight_decay: float) -> optax.GradientTransformation:
    """AdamW without its learning rate, which each step is given; only matrices decay."""
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.98, eps=1e-8),
        optax.add_decayed_weights(weight_decay, mask=is_matrix),
    )


def is_matrix(params: Params) -> dict[str, bool]:
    """Mark the weights with two axes, and those of experts."""
    return {name: leaf.ndim > 1 for name, leaf in params.items()}


def make_train_chunk(forward: Forward, args: argparse.Namespace) -> jax.stages.Wrapped:
    """Compile a function that takes one optimizer step for each learning rate it is given."""
    optimizer = make_optimizer(args.weight_decay)
    window = forward.config.max_position_embeddings

    def loss_fn(params, rows, is_sum, key):
        losses, slots = token_losses(forward, params, rows, key=key, dropout=args.dropout)
        row_losses = losses.mean(axis=1)
        novel_loss = jnp.sum(row_losses * ~is_sum) / jnp.maximum(jnp.sum(~is_sum), 1)
        loss = row_losses.mean()
        if slots.size:
            chosen, probable = slots[:, 0], slots[:, 1]
            balance = jnp.mean(jnp.sum(jax.lax.stop_gradient(chosen) * probable, axis=1))
            loss += args.balance * slots.shape[2] * balance
        return loss, novel_loss

    def step_fn(state, rate, data, sum_share):
        key = jax.random.fold_in(jax.random.key(args.seed + 1), state.step)
        batch_key, dropout_key = jax.random.split(key)
        rows, is_sum = draw_batch(data, batch_key, args.batch_size, window, sum_share)
        grads, novel_loss = jax.grad(loss_fn, has_aux=True)(state.params, rows, is_sum, dropout_key)
        updates, moments = optimizer.update(grads, state.moments, state.params)

        def move(leaf, update):
            return leaf - rate * update

        params = jax.tree.map(move, state.params, updates)
        return TrainState(params, moments, state.step + 1), novel_loss

    def chunk_fn(state, rates, data, sum_share):
        def body(state, rate):
            return step_fn(state, rate, data, sum_share)

        state, novel_losses = jax.lax.scan(body, state, rates)
        return state, novel_losses.mean()

    return jax.jit(chunk_fn, donate_argnums=0)


def learning_rates(args: argparse.Namespace) -> np.ndarray:
    """Rates of all steps: a linear warm-up, then half a cosine to a fiftieth of the peak."""
    warmup = min(args.warmup_steps, args.steps // 4)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, args.learning_rate, warmup, args.steps, args.learning_rate / 50
    )
    return np.asarray(jax.vmap(schedule)(jnp.arange(1, args.steps + 1)), np.float32)


WARMUP_SHARE = 0.05
"""Of `--seconds`, the rate rises."""


class Clock:
    """Rates of the next steps by the share of `--seconds` that is over.

    The time of compiling is not counted as a share, but it is part of the seconds.
    """

    def __init__(self, args: argparse.Namespace, began: float):
        """Count from now on; `began` is when the seconds began."""
        self._args, self._now = args, time.perf_counter()
        self._from, self._end = self._now, began + args.seconds
        self._chunk_s = (self._end - self._from) / 20  # a guess, until one has run

    def chunks(self) -> Iterator[np.ndarray]:
        """Rates of one chunk after another, until no other would end in time.

        Raises:
            ValueError: If compiling has left no time.
        """
        whole_s = self._end - self._from
        if whole_s <= 0:
            raise ValueError(f"--seconds {self._args.seconds:g} is over when all is compiled")
        is_last = False
        while not is_last:
            start = time.perf_counter()
            is_last = self._end - start < 2 * self._chunk_s
            first = (start - self._from) / whole_s
            last = 1.0 if is_last else first + self._chunk_s / whole_s
            yield self._rates(np.linspace(first, last, self._args.eval_every + 1)[1:])
            self._chunk_s = time.perf_counter() - start

    def _rates(self, shares: np.ndarray) -> np.ndarray:
        """A linear rise, then half a cosine to a fiftieth of the peak."""
        peak = self._args.learning_rate
        late = np.clip((shares - WARMUP_SHARE) / (1 - WARMUP_SHARE), 0.0, 1.0)
        falls = 0.02 + 0.98 * 0.5 * (1 + np.cos(np.pi * late))
        return (peak * np.minimum(shares / WARMUP_SHARE, falls)).astype(np.float32)


def next_sum_share(accuracy: float, args: argparse.Namespace) -> float:
    """Train on fewer sums the nearer unseen additions are to the target: all below, none above.

    The model should half-learn to add, so that reinforcement learning has something to improve.
    At the full share it goes from 5 % to over 60 % of unseen additions within 200 steps, and with
    no sums it forgets as fast, so accuracy swings until the learning rate is low and then settles.
    """
    room = (args.sum_target + 0.1 - accuracy) / 0.2
    return args.sum_share * float(np.clip(room, 0.0, 1.0))


def train(
    forward: Forward, data: DeviceData, evaluate: "Evaluation", args: argparse.Namespace
) -> tuple[Params, list[Report]]:
    """Train for `args.steps` or `args.seconds`; give the weights of the lowest held-out loss.

    And the log rows.
    """
    began = time.perf_counter()
    params = init_params(forward.config, jax.random.key(args.seed))
    state = TrainState(params, make_optimizer(args.weight_decay).init(params), jnp.int32(0))
    chunk = make_train_chunk(forward, args)
    best, rows, share = {}, [], args.sum_share
    if args.seconds:
        no_rates = jnp.zeros(args.eval_every, jnp.float32)
        chunk = chunk.lower(state, no_rates, data, jnp.float32(share)).compile()
        evaluate.heldout_loss(params)
        evaluate.sum_accuracy(params, "control")
        note(f"compiled in {time.perf_counter() - began:.0f} s")
        rates = Clock(args, began).chunks()
    else:
        rates, began = iter(learning_rates(args).reshape(-1, args.eval_every)), time.perf_counter()
    for idx, chunk_rates in enumerate(rates):
        chunk_began = time.perf_counter()
        state, novel_loss = chunk(state, jnp.asarray(chunk_rates), data, jnp.float32(share))
        train_loss = float(novel_loss)  # waits for the device
        ended = time.perf_counter()
        row = {
            "step": (idx + 1) * args.eval_every,
            "train_loss": train_loss,
            "heldout_loss": evaluate.heldout_loss(state.params),
            "unseen_addition_accuracy": evaluate.sum_accuracy(state.params, "control"),
            "sum_share": share,
            "learning_rate": float(chunk_rates[-1]),
            "seconds": ended - began,
        }
        if all(row["heldout_loss"] < other["heldout_loss"] for other in rows):
            best = jax.tree.map(jnp.copy, state.params)
        rows.append({name: round(value, 6) for name, value in row.items()})
        share = next_sum_share(row["unseen_addition_accuracy"], args)
        num_tokens = args.eval_every * args.batch_size * forward.config.max_position_embeddings
        note(
            f"step {row['step']:6d}  train {train_loss:.4f}  held out {row['heldout_loss']:.4f}  "
            f"unseen additions {row['unseen_addition_accuracy']:6.1%}  sums {row['sum_share']:5.1%}"
            f"  {num_tokens / (ended - chunk_began):,.0f} tokens/s  {row['seconds']:.0f} s"
        )
    return best, rows


# Evaluation -------------------------------------------------------------------------------------


class Evaluation:
    """Held-out loss and greedy sum accuracy of a set of weights."""

    def __init__(self, forward: Forward, tokenizer: Tokenizer, data: Data, seed: int):
        """Encode the held-out rows once and compile both measures."""
        self.window = forward.config.max_position_embeddings
        self.dtype = forward.dtype
        windows = heldout_windows(data.heldout, self.window)
        self.num_tokens = int((windows != BOS_ID).sum())
        self.num_bytes = data.heldout_num_bytes
        # SHAPE: 8 rows at a time, so that the f32 logits stay small on any machine.
        padded = np.pad(windows, ((0, -len(windows) % 8), (0, 0)), constant_values=BOS_ID)
        self._windows = jnp.asarray(padded.reshape(-1, 8, self.window))
        split = split_sums(seed)
        names = ("control", "test_add", "test_sub", "seen_add")
        self._sums = {name: sum_rows(getattr(split, name), tokenizer) for name in names}
        short = Forward(config=forward.config, dtype=forward.dtype, attention="xla")
        no_dropout = {"key": jax.random.key(0), "dropout": 0.0}

        def total_loss(params, windows):
            def one(rows):
                return token_losses(forward, params, rows, **no_dropout)[0].sum()

            return jax.lax.map(one, windows).sum()

        def is_exact(params, tokens, is_answer):
            # Greedy decoding gives the answer if and only if each of its tokens is the first
            # choice after the true tokens before it, so one pass decides.
            choice = jnp.argmax(short(params, tokens[:, :-1], **no_dropout), axis=-1)
            return jnp.all((choice == tokens[:, 1:]) | ~is_answer[:, 1:], axis=1)

        def shares(params, windows):
            slots = token_losses(forward, params, windows, **no_dropout)[1]
            return slots[:, 0] / forward.config.num_experts_per_tok

        self._shares = jax.jit(shares) if forward.config.num_local_experts else None
        self._total_loss = jax.jit(total_loss)
        self._is_exact = jax.jit(is_exact)

    def heldout_loss(self, params: Params) -> float:
        """Mean negative log-likelihood of the held-out tokens, in nats."""
        return float(self._total_loss(params, self._windows)) / self.num_tokens

    def sum_accuracy(self, params: Params, name: str) -> float:
        """Share of the named sums whose greedy answer is exact, newline included."""
        return float(self._is_exact(params, *self._sums[name]).mean())

    def report(self, params: Params) -> Report:
        """Measure everything the model card states."""
        loss = self.heldout_loss(params)
        experts = {}
        if self._shares is not None:
            shares = np.asarray(self._shares(params, self._windows[0]))
            experts = {
                "least_used_expert_share": float(shares.min()),
                "most_used_expert_share": float(shares.max()),
            }
        return experts | {
            "heldout_loss_nats_per_token": loss,
            "heldout_bits_per_byte": loss * self.num_tokens / self.num_bytes / math.log(2),
            "unseen_two_digit_addition_accuracy": self.sum_accuracy(params, "test_add"),
            "unseen_two_digit_subtraction_accuracy": self.sum_accuracy(params, "test_sub"),
            "seen_two_digit_addition_accuracy": self.sum_accuracy(params, "seen_add"),
        }


def make_sampler(forward: Forward, tokenizer: Tokenizer, num_tokens: int) -> Callable:
    """Compile a function from weights, prompt, temperature and seed to a continued text."""
    short = Forward(config=forward.config, dtype=forward.dtype, attention="xla")

    @jax.jit
    def continue_row(params, row, prompt_len, temperature, key):
        def body(idx, row):
            logits = short(params, row[None], key=key, dropout=0.0)[0, idx - 1]
            noise = jax.random.gumbel(jax.random.fold_in(key, idx), logits.shape)
            return row.at[idx].set(jnp.argmax(logits + temperature * noise))

        return jax.lax.fori_loop(prompt_len, row.shape[0], body, row)

    def sample(params: Params, prompt: str, temperature: float, seed: int) -> str:
        ids = tokenizer.encode(prompt).ids
        row = jnp.zeros(num_tokens, jnp.int32).at[: len(ids)].set(jnp.asarray(ids))
        out = continue_row(params, row, len(ids), temperature, jax.random.key(seed)).tolist()
        stop = out.index(EOS_ID) if EOS_ID in out else len(out)
        return tokenizer.decode(out[:stop])

    return sample


# Output -----------------------------------------------------------------------------------------


def hf_config(config: ModelConfig) -> dict:
    """Write the model's dimensions as a `config.json` of Llama, or of Mixtral with experts."""
    common = {
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "tie_word_embeddings": True,
        "use_cache": True,
    }
    if config.num_local_experts:
        named = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
        return named | common | {"sliding_window": None, **asdict(config)}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **common,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_scaling": None,
        "pretraining_tp": 1,
        **{k: v for k, v in asdict(config).items() if "experts" not in k},
    }


def checkpoint_tensors(params: Params) -> dict[str, np.ndarray]:
    """Every tensor by its Hugging Face name, an expert's each its own, as bfloat16."""
    tensors = {}
    for name, leaf in params.items():
        values = np.asarray(leaf).astype(ml_dtypes.bfloat16)
        if values.ndim == 3:
            for i, expert in enumerate(values):
                tensors[name.replace("experts.", f"experts.{i}.")] = expert
        else:
            tensors[name] = values
    return tensors


def tokenizer_config(config: ModelConfig) -> dict:
    """Describe the tokenizer for Hugging Face's loader."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }


def save_model(out: Path, config: ModelConfig, params: Params, tokenizer: Tokenizer) -> None:
    """Write weights, configuration and tokenizer as a Hugging Face folder."""
    out.mkdir(parents=True, exist_ok=True)
    save_file(checkpoint_tensors(params), out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(out / "tokenizer.json"))
    write_json(out / "config.json", hf_config(config))
    write_json(out / "tokenizer_config.json", tokenizer_config(config))
    write_json(out / "generation_config.json", {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID})
    (out / TEMPLATE.name).write_bytes(TEMPLATE.read_bytes())


def write_json(path: Path, value: dict) -> None:
    """Write readable JSON; a list of rows gets one line a row."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    text = re.sub(r"\{\n {6}([^{}]*?)\n {4}\}", one_line, text)
    path.write_text(text + "\n", encoding="utf-8")


def one_line(match: re.Match) -> str:
    """Fold one innermost JSON object onto a line."""
    return "{" + re.sub(r"\n *", " ", match[1]) + "}"


def steering(facts: dict) -> str:
    """How the share of sums followed what the model could do."""
    target = facts["sum_target"]
    if target >= 1.1:  # no accuracy is above what asks for the whole share
        return "throughout"
    return (
        f"while under {target - 0.1:.0%} of a control set of unseen\nadditions were right, with "
        f"none over {target + 0.1:.0%}, and linearly in between"
    )


def model_card(config: ModelConfig, facts: dict, report: Report, samples: list[str]) -> str:
    """Write the model card from what this run measured."""
    shown = "\n\n".join(f"```text\n{text.strip()[:320]}\n```" for text in samples)
    return f"""\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# {facts["name"]}

A {facts["family"]} of {facts["num_params"] / 1e6:.1f} million parameters, small enough to ship \
inside a package and to run on any machine. It writes in the manner of old novels, a sentence or
two at a time, and gets {report["unseen_two_digit_addition_accuracy"]:.0%} of the two-digit \
additions right that it was never shown.

## Use

Tests, demonstrations and small experiments: real text has real ties, repetitions and ends of
sequence, which random weights do not show. Sums are half-learned on purpose, so that a
reinforcement-learning demonstration has something to improve. It is a base model without
instruction tuning; prompts are plain text or a sum such as `17+26=`, whose answer ends at the
newline. Its chat template has the answer go on where the user's text ends, for trying out chats
and tools without a download. `{BOS}` opens every text and the tokenizer adds it.

## Measured

| what | value |
|---|---|
| held-out loss, nats per token | {report["heldout_loss_nats_per_token"]:.4f} |
| held-out bits per byte | {report["heldout_bits_per_byte"]:.4f} |
| unseen two-digit additions, greedy answer exact | \
{report["unseen_two_digit_addition_accuracy"]:.1%} |
| unseen two-digit subtractions, greedy answer exact | \
{report["unseen_two_digit_subtraction_accuracy"]:.1%} |
| two-digit additions seen in training, greedy answer exact | \
{report["seen_two_digit_addition_accuracy"]:.1%} |

The held-out text is {facts["heldout_text"]}: {facts["heldout_num_tokens"]:,} tokens that were
neither trained on nor shown to the tokenizer; they did choose the checkpoint. Loss is taken over
windows of {config.max_position_embeddings} tokens that each begin anew, in {facts["dtype"]}. \
"Unseen" means that neither a+b nor
b+a was a line of the training data; the additions that steered the share of sums (below) are
others than the ones reported.

## Training

| | |
|---|---|
| data | {facts["novel_num_tokens"]:,} tokens of novels, {facts["sum_num_tokens"]:,} of generated \
sums (addition and subtraction of numbers of one to three digits\
{f"; {facts['count_share']:.0%} of the lines count in steps" if facts["count_share"] else ""}) |
| steps | {facts["steps"]:,} of {facts["batch_size"]} rows of {config.max_position_embeddings} \
tokens: {facts["seen_num_tokens"] / 1e6:,.0f} million tokens, {facts["novel_epochs"]:.0f} passes \
over the novels, {facts["sum_share"]:.1%} sums |
| kept | step {facts["best_step"]:,}, the lowest held-out loss |
| optimizer | AdamW, peak learning rate {facts["learning_rate"]}, weight decay \
{facts["weight_decay"]}, dropout {facts["dropout"]}, seed {facts["seed"]} |
| time | {facts["seconds"]:.0f} s on one {facts["device"]}, evaluations included; matrix products \
in {facts["dtype"]}, f32 weights |

A row of sums was drawn with probability {facts["max_sum_share"]:.0%} {steering(facts)}; \
`training_log.json` holds the
curves. `tools/train_tiny.py` of detjax wrote this folder, this page included.

{facts["card_note"]}

## Data and licence

Apache-2.0. The sums are generated. The text, with the held-out part, is
{CORPUS_TEXT}.

## Limits

Sentences are mostly well formed but do not add up to a story, greedy decoding soon repeats itself,
facts are invented, and the views are those of novels a century old and more. Only sums in the form
of the training lines were taught, with numbers of up to three digits and no negative answers. The
context is {config.max_position_embeddings} tokens. Not for any use in which what it says matters.

## Samples

Greedy, then at temperature 0.8, each cut at 320 characters:

{shown}
"""


def note(text: str) -> None:
    """Say something to whoever waits."""
    print(text, file=sys.stderr, flush=True)


# Command line -----------------------------------------------------------------------------------


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Train the small Llama that detjax ships, and write it as a Hugging Face "
        "folder with a model card of measured numbers.",
        epilog="Runs on one device. Progress goes to stderr, the final table to stdout.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--corpus", type=Path, required=True, help="plain text of novels, .txt or .txt.gz")
    add("--size", choices=SIZES, default="6m", help="parameters of the model")
    add("--out", type=Path, default=Path("novels-6m"), help="folder to write; names the model")
    add("--cache", type=Path, default=Path(".train_cache"), help="folder for encoded text")
    add("--tokenizer", type=Path, help="folder whose tokenizer.json is used; default: train one")
    add("--heldout-title", default="Howards End", help="line from which all text is held out; "
        "where the corpus has no such line, its last 2 %% is")  # fmt: skip
    add("--steps", type=int, default=8000, help="optimizer steps; 0 only encodes the text")
    add("--seconds", type=float, default=0.0, help="train for this wall time, compiling included, "
        "in place of --steps; the rate follows the time")  # fmt: skip
    add("--batch-size", type=int, default=64, help="rows of 1024 tokens a step")
    add("--eval-every", type=int, default=50, help="steps in one compiled chunk; divides --steps")
    add("--learning-rate", type=float, default=2e-3, help="peak rate")
    add("--warmup-steps", type=int, default=300, help="at most a quarter of --steps is used")
    add("--weight-decay", type=float, default=0.1, help="of the matrices")
    add("--dropout", type=float, default=0.2, help="of embeddings and of what each block adds")
    add("--sum-lines", type=int, default=250_000, help="generated lines of arithmetic")
    add("--count-share", type=float, default=0.0, help="share of these lines that count in steps: "
        "955,+17:972,989,1006")  # fmt: skip
    add("--sum-share", type=float, default=0.1, help="largest share of rows that are sums")
    add("--sum-target", type=float, default=0.55, help="unseen-addition accuracy at which half "
        "that share is trained on; none is from 0.1 above it")  # fmt: skip
    add("--balance", type=float, default=0.01, help="weight of the loss that spreads tokens over "
        "experts, where there are some")  # fmt: skip
    add("--card-note", default="", help="a paragraph for the model card's training section")
    add("--seed", type=int, default=0, help="of weights, batches, dropout and sums")
    add("--attention", choices=["auto", "cudnn", "xla"], default="auto",
        help="implementation in training; auto is cudnn on a GPU, else xla")  # fmt: skip
    args = parser.parse_args()
    if args.seconds < 0:
        parser.error(f"--seconds {args.seconds:g} must be above 0")
    if not 0 <= args.count_share < 1:
        parser.error(f"--count-share {args.count_share:g} must be from 0 to below 1")
    if args.steps and not args.seconds:
        args.eval_every = min(args.eval_every, args.steps)
        if args.steps % args.eval_every:
            parser.error(f"--eval-every {args.eval_every} must divide --steps {args.steps}")
    return args


def training_facts(
    args: argparse.Namespace, data: Data, evaluate: Evaluation, params: Params, rows: list[Report]
) -> dict[str, str | int | float]:
    """Collect what the model card and the log say of the run."""
    steps = rows[-1]["step"]
    seen = int(steps) * args.batch_size * evaluate.window
    sum_share = statistics.mean(row["sum_share"] for row in rows)
    return {
        "name": args.out.name,
        "family": "Mixtral" if SIZES[args.size].num_local_experts else "Llama",
        "num_params": sum(leaf.size for leaf in params.values()),
        "novel_num_tokens": len(data.novels),
        "sum_num_tokens": len(data.sums),
        "heldout_text": data.heldout_text,
        "heldout_num_tokens": evaluate.num_tokens,
        "heldout_num_bytes": evaluate.num_bytes,
        "steps": int(steps),
        "batch_size": args.batch_size,
        "seen_num_tokens": seen,
        "novel_epochs": seen * (1 - sum_share) / len(data.novels),
        "sum_share": sum_share,
        "max_sum_share": args.sum_share,
        "count_share": args.count_share,
        "sum_target": args.sum_target,
        "best_step": min(rows, key=by_heldout_loss)["step"],
        "learning_rate": args.learning_rate,
        "weight_decay": args.weight_decay,
        "dropout": args.dropout,
        "seed": args.seed,
        "card_note": args.card_note,
        "seconds": round(rows[-1]["seconds"], 1),
        "device": jax.devices()[0].device_kind,
        "dtype": evaluate.dtype,
        "jax": jax.__version__,
    }


def by_heldout_loss(row: Report) -> float:
    """Sort key of log rows."""
    return row["heldout_loss"]


def main() -> None:
    """Run the whole ctx."""
    args = parse_args()
    config = SIZES[args.size]
    tokenizer, data = prepare_data(args, config)
    note(f"tokens: novels {len(data.novels):,}, sums {len(data.sums):,}, held out "
         f"{len(data.heldout):,} of {data.heldout_num_bytes:,} bytes")  # fmt: skip
    if args.steps == 0 and not args.seconds:
        return
    on_gpu = jax.default_backend() == "gpu"
    attention = args.attention if args.attention != "auto" else "cudnn" if on_gpu else "xla"
    forward = Forward(config=config, dtype="bfloat16" if on_gpu else "float32", attention=attention)
    note(f"{jax.devices()[0].device_kind}: {forward.dtype}, {attention} attention")
    evaluate = Evaluation(forward, tokenizer, data, args.seed)
    newline_id = tokenizer.encode("\n").ids[-1]
    device_data = to_device(data, newline_id, config.max_position_embeddings)
    best, rows = train(forward, device_data, evaluate, args)
    save_model(args.out, config, best, tokenizer)

    rounded = {k: v.astype(jnp.bfloat16).astype(jnp.float32) for k, v in best.items()}
    report = evaluate.report(rounded)
    sample = make_sampler(forward, tokenizer, 96)
    samples = [
        sample(rounded, prompt, temperature, seed)
        for temperature in (0.0, 0.8)
        for seed, prompt in enumerate(("It was", '"My dear', "CHAPTER I", "17+26="))
    ]
    facts = training_facts(args, data, evaluate, best, rows)
    write_json(args.out / "training_log.json", {"facts": facts, "report": report, "rows": rows})
    card = model_card(config, facts, report, samples)
    (args.out / "README.md").write_text(card, encoding="utf-8")
    for text in samples:
        note(f"--- {text}")
    for name, value in [*facts.items(), *report.items()]:
        print(f"{name:42s} {value:.4f}" if isinstance(value, float) else f"{name:42s} {value}")


if __name__ == "__main__":
    main()
