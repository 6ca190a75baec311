# SPDX-License-Identifier: Apache-2.0
"""`docs/numerics.md` implemented once more, in NumPy and from that page alone, answers alike.

Where the page leaves an order to the backend, NumPy has another one, so logprobs are near and
tokens are equal; where it names each rounding, bits are compared.
"""

import hashlib
import json
import math
import struct
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import MAX_TEMPERATURE, SamplingParams
from detjax.models.bundled import bundled_model_path
from detjax.models.loading import load_model
from detjax.models.weights.load import ignore_progress
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.attention import api as attention_api
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.paged_cache import CachePlace
from detjax.pallas_kernels.rms_norm import api as rms_norm_api
from detjax.pallas_kernels.sampling import api as sampling_api
from detjax.parallel.mesh import make_mesh
from detjax.testing import assert_bitwise_equal

F = np.float32
BLOCK, SPLIT, LEAVES, CHUNK = 128, 512, 8, 128


# --------------------------------------------------------------------------------- the page, again


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """To nearest, ties to even, kept as float32."""
    bits = np.ascontiguousarray(x, F).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(F)


def fused(a, b, c) -> np.ndarray:
    """`a * b + c`, rounded once: float32 factors are exact in the wider product."""
    return (np.longdouble(a) * np.longdouble(b) + np.longdouble(c)).astype(F)


class Page:
    """A model's answers by the page."""

    def __init__(self, folder, compute_dtype: str):
        self.config = json.loads((folder / "config.json").read_text())
        raw = (folder / "model.safetensors").read_bytes()
        size = int.from_bytes(raw[:8], "little")
        self.weights = {}
        for name, entry in json.loads(raw[8 : 8 + size]).items():
            if name != "__metadata__":
                assert entry["dtype"] == "BF16"
                first, last = entry["data_offsets"]
                bits = np.frombuffer(raw[8 + size + first : 8 + size + last], "<u2")
                self.weights[name] = (bits.astype(np.uint32) << 16).view(F).reshape(entry["shape"])
        self.round = to_bfloat16 if compute_dtype == "bfloat16" else lambda x: np.asarray(x, F)

    def norm(self, x, gain):
        mean = fused(np.sum(x * x, axis=-1, dtype=F), F(1) / F(x.shape[-1]), self.eps)
        return self.round(x * (F(1) / np.sqrt(mean))[..., None] * gain)

    @property
    def eps(self):
        return F(self.config["rms_norm_eps"])

    def add_leaves(self, x, weight, residual):
        """Eight leaves of K, each summed in order, added as the perfect binary tree."""
        parts = np.split(np.arange(x.shape[-1]), LEAVES)
        leaves = [x[..., part] @ weight[:, part].T for part in parts]
        while len(leaves) > 1:
            leaves = [a + b for a, b in zip(leaves[::2], leaves[1::2], strict=True)]
        return self.round(residual + leaves[0])

    def rotate(self, x):
        """Half-split pairs of [T, heads, C], positions from 0."""
        half = x.shape[-1] // 2
        turns = float(self.config["rope_theta"]) ** (-np.arange(half) / half)
        angles = np.arange(len(x))[:, None] * turns
        cos, sin = np.cos(angles).astype(F)[:, None], np.sin(angles).astype(F)[:, None]
        low, high = x[..., :half], x[..., half:]
        return self.round(np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1))

    def attend(self, q, k, v, position):
        """Query heads [H, C] over keys and values [H, S, C]."""
        scale = F(math.log2(math.e) * q.shape[-1] ** -0.5)
        none = np.full((len(q), 1), -np.inf, F), np.zeros((len(q), 1), F), np.zeros_like(q)
        big = none
        for start in range(0, position + 1, SPLIT):
            m, total, out = none
            for first in range(start, min(start + SPLIT, position + 1), BLOCK):
                keys = slice(first, min(first + BLOCK, position + 1))
                scores = (k[:, keys] @ q[..., None])[..., 0] * scale
                new_m = np.maximum(m, scores.max(axis=1, keepdims=True))
                weights, decay = np.exp2(scores - new_m), np.exp2(m - new_m)
                total = total * decay + weights.sum(axis=1, keepdims=True, dtype=F)
                out = out * decay + (self.round(weights)[:, None] @ v[:, keys])[:, 0]
                m = new_m
            new_m = np.maximum(big[0], m)
            before, after = np.exp2(big[0] - new_m), np.exp2(m - new_m)
            big = new_m, big[1] * before + total * after, big[2] * before + out * after
        return self.round(big[2] * (F(1) / big[1]))

    def logits(self, token_ids) -> np.ndarray:
        """Of every position: [T, V]."""
        w, heads = self.weights, self.config["num_attention_heads"]
        groups = heads // self.config["num_key_value_heads"]
        residual = w["model.embed_tokens.weight"][list(token_ids)]
        for layer in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{layer}."
            x = self.norm(residual, w[at + "input_layernorm.weight"])
            q, k, v = (
                self.round(x @ w[f"{at}self_attn.{name}_proj.weight"].T).reshape(
                    len(x), -1, self.config["head_dim"]
                )
                for name in "qkv"
            )
            q, k = self.rotate(q), self.rotate(k)
            k, v = (np.repeat(x, groups, axis=1).transpose(1, 0, 2) for x in (k, v))
            out = np.stack([self.attend(q[t], k, v, t) for t in range(len(x))])
            out = out.reshape(len(x), -1)
            residual = self.add_leaves(out, w[at + "self_attn.o_proj.weight"], residual)
            x = self.norm(residual, w[at + "post_attention_layernorm.weight"])
            gate = self.round(x @ w[f"{at}mlp.gate_proj.weight"].T)
            up = self.round(x @ w[f"{at}mlp.up_proj.weight"].T)
            x = self.round(gate / (F(1) + np.exp(-gate)) * up)
            residual = self.add_leaves(x, w[at + "mlp.down_proj.weight"], residual)
        x = self.norm(residual, w["model.norm.weight"])
        return x @ w["model.embed_tokens.weight"].T


def threefry(key, counter):
    """Threefry-2x32, 20 rounds, on uint32 arrays."""
    u = np.uint32
    keys = [u(key[0]), u(key[1]), u(key[0]) ^ u(key[1]) ^ u(0x1BD11BDA)]
    x0, x1 = (np.asarray(c, u).reshape(-1) for c in counter)
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for group in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x0 = x0 + x1
            x1 = ((x1 << u(turn)) | (x1 >> u(32 - turn))) ^ x0
        x0, x1 = x0 + keys[(group + 1) % 3], x1 + keys[(group + 2) % 3] + u(group + 1)
    return x0, x1


def noise_of(
    params: SamplingParams, prompt: tuple[int, ...], seq: int, position: int, count: int
) -> np.ndarray:
    key = struct.pack("<Q", params.seed)
    if params.noise == "per_prompt":
        text = key + struct.pack(f"<{len(prompt)}i", *prompt)
        key = hashlib.blake2b(text, digest_size=8).digest()
    k0, k1 = threefry(struct.unpack("<2I", key), (seq, position))
    ids = np.arange(count, dtype=np.uint32)
    bits = threefry((k0[0], k1[0]), (ids, np.zeros_like(ids)))[0]
    u = np.minimum((bits.astype(F) + F(0.5)) * F(2.0**-32), F(1 - 2.0**-24))
    return -np.log(-np.log1p(-u))


def reciprocal(temperature) -> F:
    return F(1) / F(temperature)


def kept_tokens(x: np.ndarray, params: SamplingParams) -> np.ndarray:
    order = np.argsort(-x, kind="stable")
    ranks = np.arange(len(x))
    weights = np.exp((x[order] - x[order[0]]) * reciprocal(params.temperature))
    top_k = params.top_k or len(x)
    counted = np.where(ranks < top_k, weights, F(0))
    before, start = np.zeros_like(x), F(0)
    for first in range(0, len(x), CHUNK):
        inside = np.cumsum(counted[first : first + CHUNK], dtype=F)
        before[first : first + CHUNK] = start + np.concatenate([[F(0)], inside[:-1]])
        start = start + inside[-1]
    kept = (ranks < top_k) & (weights >= F(params.min_p))
    kept &= (before < F(params.top_p) * start) | (params.top_p >= 1)
    kept[0] = True
    by_token = np.zeros(len(x), bool)
    by_token[order[kept]] = True
    return by_token


def scores_of(
    x: np.ndarray, params: SamplingParams, prompt: tuple[int, ...], seq: int, position: int
) -> np.ndarray:
    """What the first maximum is taken of."""
    if params.temperature == 0:
        return x
    noise = noise_of(params, prompt, seq, position, len(x))
    scores = fused(x, reciprocal(params.temperature), noise)
    return np.where(kept_tokens(x, params), scores, F(-np.inf))


# ---------------------------------------------------------------------------------- the comparison


@cache
def page(compute_dtype: str) -> Page:
    return Page(bundled_model_path(), compute_dtype)


REQUESTS = tuple(
    Request(
        prompt_token_ids=tuple((7 + 11 * i + 131 * t) % 4096 for t in range(length)),
        sampling=SamplingParams(max_tokens=10, seed=2**40 + i, **sampling),
    )
    for i, (length, sampling) in enumerate(
        [
            (5, {}),
            (133, {}),  # over a page
            (9, {"temperature": 0.8, "n": 2}),
            (3, {"temperature": 1.7}),
            (3, {"temperature": 1.4, "noise": "common"}),
            (4, {"temperature": MAX_TEMPERATURE}),
            (6, {"temperature": 1.0, "top_k": 7}),
            (7, {"temperature": 1.2, "top_p": 0.8}),
            (8, {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "min_p": 0.02}),
        ]
    )
)


@pytest.mark.slow
@pytest.mark.golden
@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_another_implementation_of_the_page_gives_the_same_tokens(compute_dtype):
    """Float32 logits differ by the order of sums alone, and all tokens are equal. In bfloat16 that
    order moves some activations over an edge of rounding, and a near tie may fall the other way."""
    model = load_model(
        str(bundled_model_path()), revision=None, mesh=make_mesh(1, 1), backend=Backend.PORTABLE,
        profile=NumericsProfile(compute_dtype=compute_dtype), progress=ignore_progress,
    )  # fmt: skip
    engine = Engine(model, EngineConfig(batch_size=8, prefill_chunk=64, max_len=256))
    bound = {"float32": 1e-4, "bfloat16": 0.1}[compute_dtype]
    num_near = num_tokens = 0
    for completion in engine.generate(REQUESTS):
        params = REQUESTS[completion.request_idx].sampling
        prompt = completion.prompt_token_ids
        length = len(prompt)
        logits = page(compute_dtype).logits(prompt + completion.token_ids)
        for i, (token_id, logprob) in enumerate(
            zip(completion.token_ids, completion.logprobs, strict=True)
        ):
            x = logits[length + i - 1]
            scores = scores_of(x, params, prompt, completion.sequence_idx, length + i)
            best = np.argmax(scores)
            assert token_id == best or scores[best] - scores[token_id] < bound
            num_near += token_id != best
            num_tokens += 1
            log_sum = np.log(np.sum(np.exp(x.astype(np.float64) - x.max()))) + x.max()
            assert abs(logprob - (x[token_id] - log_sum)) < bound, (completion.request_idx, i)
    assert num_tokens > 70 and num_near <= (2 if compute_dtype == "bfloat16" else 0)


def of_kernel(x, temperature, seed: int = 3) -> np.ndarray:
    """Scores of one row."""
    key = (jnp.full(1, seed, jnp.uint32), jnp.full(1, 9, jnp.uint32))
    return np.asarray(
        sampling_api.gumbel_scores(
            jnp.asarray(x, jnp.float32)[None], jnp.full(1, temperature, jnp.float32), key,
            first_token_id=0, backend=Backend.PORTABLE,
        )
    )[0]  # fmt: skip


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.1, 2.5, 1e-30, MAX_TEMPERATURE])
def test_a_score_is_a_fused_product_with_the_rounded_reciprocal(temperature):
    """The control is IEEE division: a quarter of the scores differ where 1/T is not exact."""
    x = np.random.default_rng(0).normal(0, 5, 1000).astype(F)
    noise = of_kernel(np.zeros_like(x), 1.0)
    got = of_kernel(x, temperature)
    want = fused(x, reciprocal(temperature), noise)
    assert_bitwise_equal(got, want, claim=f"scores at {temperature}")
    if temperature in (0.3, 0.7, 1.1):
        assert (got != x / F(temperature) + noise).mean() > 0.1


@pytest.mark.parametrize("temperature", [1e-30, 1.0, MAX_TEMPERATURE, 2e38, 3.4e38])
def test_padding_keeps_minus_infinity_at_every_temperature(temperature):
    x = np.full(256, -np.inf, F)
    x[:5] = 1.0
    got = of_kernel(x, temperature)
    assert_bitwise_equal(got[5:], x[5:], claim="padding")
    assert np.isfinite(got[:5]).all()


def test_a_weight_of_the_nucleus_is_an_exponential_of_the_same_product():
    x = -np.sort(-np.random.default_rng(1).normal(0, 5, (3, 500)).astype(F), axis=1)
    temperatures = np.array([0.3, 0.7, 1.9], F)

    def weights(of, t):
        everything = jnp.full(3, 500, jnp.int32), jnp.ones(3, jnp.float32)
        sums = sampling_api.nucleus_sums(
            jnp.asarray(of), jnp.asarray(t), *everything, backend=Backend.PORTABLE
        )
        return np.asarray(sums[0])

    difference = x - x[:, :1]
    ones, factors = np.ones(3, F), (F(1) / temperatures)[:, None]
    got = weights(x, temperatures)
    assert_bitwise_equal(got, weights(difference * factors, ones), claim="weights")
    assert (got != weights(difference / temperatures[:, None], ones)).mean() > 0.05


def test_attention_ends_with_a_product_with_the_rounded_reciprocal():
    """Queries of zero: every weight is 1, so the sums are whole numbers and exact."""
    length, channels = 107, 16
    values = np.random.default_rng(2).integers(-99, 99, (length, channels)).astype(F)
    pages = np.zeros((1, 1, 2, 1, 128, channels), F)
    pages[0, 0, 1, 0, :length] = values
    positions = np.arange(length, dtype=np.int32)[None]
    out = attention_api.attention(
        jnp.zeros((1, length, 1, channels), jnp.float32),
        CachePlace(
            jnp.asarray(pages), jnp.zeros((1, 1), jnp.int32), jnp.asarray(positions), layer=0
        ),
        window=None,
        profile=NumericsProfile(compute_dtype="float32"),
        backend=Backend.PORTABLE,
    )
    sums, counts = np.cumsum(values, axis=0, dtype=F), (positions[0, :, None] + 1).astype(F)
    want = sums * (F(1) / counts)
    got = np.asarray(out)[0, :, 0]
    assert_bitwise_equal(got, np.where(want == 0, F(0), want), claim="attention of equal weights")
    assert (got != sums / counts).mean() > 0.1


def test_a_mean_square_is_fused_with_eps_from_the_rounded_reciprocal_of_the_width():
    """Rows of one element, whose square is exact. The control divides by the width."""
    values, width, eps = np.arange(1, 1025).astype(F), 384, F(0.37)
    x = np.zeros((len(values), width), F)
    x[:, 0] = values
    gain = jnp.ones(width, jnp.float32)
    got = rms_norm_api.rms_norm(jnp.asarray(x), gain, eps=float(eps), backend=Backend.PORTABLE)
    got = np.asarray(got)[:, 0]

    def by(mean_square):
        return values * np.asarray(jax.jit(lax.rsqrt)(jnp.asarray(mean_square)))

    fused_mean = fused(values * values, F(1) / F(width), eps)
    assert_bitwise_equal(got, by(fused_mean), claim="the root mean square")
    assert (got != by(values * values / F(width) + eps)).mean() > 0.05
