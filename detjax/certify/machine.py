# SPDX-License-Identifier: Apache-2.0
"""Whether a GPU gives the bits that the reference kernels compute on the CPU of the same machine.

`docs/reference.md` defines these bits. The reference kernels are that definition in C++.
"""

import gc
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from detjax.certify.cases import timed
from detjax.certify.certificate import BitComparison, Outcome, compare
from detjax.certify.operands import PRODUCT_KINDS, draw_operands
from detjax.certify.requests import AnswerBits, make_requests
from detjax.certify.subject import Subject
from detjax.engine.config import EngineConfig
from detjax.models.bundled import bundled_model_path
from detjax.numerics import NumericsProfile
from detjax.opening import load_on_devices
from detjax.pallas_kernels.attention.api import attention
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.backend_choice import why_not_runnable
from detjax.pallas_kernels.linear.api import linear
from detjax.pallas_kernels.log_softmax.api import block_stats, log_sum_exp
from detjax.pallas_kernels.paged_cache import CachePlace
from detjax.pallas_kernels.rms_norm.api import rms_norm
from detjax.pallas_kernels.sampling.api import gumbel_scores
from detjax.pallas_kernels.swiglu.api import swiglu
from detjax.pallas_kernels.tensor_core import DEPTH

CLAIM = "machine-invariant"
BF16, F32 = ml_dtypes.bfloat16, jnp.dtype(jnp.float32)
SHAPES = ((8, 1024, 256), (200, 1024, 256))
"""M, K and N of the products: few rows and many have kernels of their own."""
NUM_REQUESTS = 4

Run = Callable[[Backend], Sequence[jax.Array]]


def why_not_applicable(backend: Backend) -> str:
    """Say why no bit can be compared for this backend; empty if it can be."""
    if backend.platform == "cpu":
        return (
            f"the {backend.value} backend runs on a CPU, and the claim is that a GPU gives the "
            "bits that a CPU computes"
        )
    return why_not_runnable(Backend.REFERENCE) or ""


def machine_cases(backend: Backend) -> Iterator[Outcome]:
    """Compare operations and whole answers of a backend with those of the reference kernels.

    Yields:
        An outcome for each kind of operand and function, for the answers of the bundled model, and
        for the control: the same products with their steps in another order.
    """
    runs = [*_products(), *_functions()]
    for name, run in runs:
        yield timed(CLAIM, name, lambda run=run: _compare_runs(backend, run), round_idx=0)
    name = f"answers of the bundled model, {NUM_REQUESTS} requests"
    yield timed(CLAIM, name, lambda: _compare_answers(backend), round_idx=0)
    yield timed(
        CLAIM,
        "steps of 16 products in another order",
        lambda: _compare_reordered(backend),
        round_idx=0,
        is_control=True,
    )


# -------------------------------------------------------------------------------------- operations


def _results(backend: Backend, run: Run) -> list[np.ndarray]:
    with jax.default_device(jax.devices(backend.platform)[0]):
        return [np.asarray(array) for array in run(backend)]


def compare_arrays(got: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> BitComparison:
    """Compare arrays element by element; NaN have bits like every other value."""
    num_compared = num_different = 0
    first = ""
    for mine, its in zip(got, want, strict=True):
        assert mine.shape == its.shape and mine.dtype == its.dtype
        a, b = (array.view(f"uint{8 * array.dtype.itemsize}").reshape(-1) for array in (mine, its))
        differing = np.flatnonzero(a != b)
        num_compared += a.size
        num_different += differing.size
        if differing.size and not first:
            at = int(differing[0])
            place = tuple(map(int, np.unravel_index(at, mine.shape)))
            first = f"element {place}: 0x{a[at]:x} is not 0x{b[at]:x}"
    return BitComparison(num_compared, num_different, first)


def _compare_runs(backend: Backend, run: Run) -> BitComparison:
    return compare_arrays(_results(backend, run), _results(Backend.REFERENCE, run))


def _product(x: np.ndarray, w: np.ndarray, backend: Backend) -> jax.Array:
    return linear(jnp.asarray(x), jnp.asarray(w), out_dtype=F32, backend=backend)


def _products() -> Iterator[tuple[str, Run]]:
    for kind in PRODUCT_KINDS:
        operands = [draw_operands(kind, *shape) for shape in SHAPES]
        steps = sum(m * k * n // DEPTH for m, k, n in SHAPES)
        yield (
            f"products, {kind}: {steps / 1e6:.1f} million steps of {DEPTH}",
            lambda on, operands=operands: [_product(x, w, on) for x, w in operands],
        )


def _compare_reordered(backend: Backend) -> BitComparison:
    """Products of a backend whose steps have changed places, with the reference's in order."""
    x, w = draw_operands("wide", *SHAPES[1])
    order = np.arange(x.shape[1]).reshape(-1, DEPTH)[::-1].reshape(-1)
    got = _results(backend, lambda on: [_product(x[:, order], w[:, order], on)])
    return compare_arrays(got, _results(Backend.REFERENCE, lambda on: [_product(x, w, on)]))


def _functions() -> Iterator[tuple[str, Run]]:
    """The special functions, each in an operation that calls it."""
    rng = np.random.default_rng(31)

    def drawn(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (rng.standard_normal(shape) * scale).astype(BF16)

    patterns = np.arange(1 << 16, dtype=np.uint16).view(BF16)
    finite = np.where(np.isfinite(patterns.astype(np.float32)), patterns, BF16(1))
    gate_up = np.concatenate([finite, drawn(1 << 16)])[None]
    yield (
        "exp and reciprocals: SwiGLU of every finite bfloat16",
        lambda on: [swiglu(jnp.asarray(gate_up), backend=on)],
    )
    rows = (drawn(256, 1024) * 2.0 ** rng.integers(-30, 31, (256, 1))).astype(BF16)
    gain = drawn(1024)
    yield (
        "inverse square roots: RMSNorm",
        lambda on: [rms_norm(jnp.asarray(rows), jnp.asarray(gain), eps=1e-5, backend=on)],
    )
    logits = (rng.standard_normal((64, 4096)) * 6).astype(np.float32)
    yield (
        "exp: sums of the log-softmax",
        lambda on: block_stats(jnp.asarray(logits), vocab_block=128, backend=on),
    )
    sums = rng.integers(1 << 23, 0x7F800000, (1 << 16, 1), dtype=np.uint32).view(np.float32)
    yield (
        "log: of random normal float32",
        lambda on: [log_sum_exp(jnp.zeros(sums.shape), jnp.asarray(sums), backend=on)],
    )
    keys = rng.integers(0, 2**32, (2, 64), dtype=np.uint32)
    yield (
        "log and log1p: noise of sampling",
        lambda on: [
            gumbel_scores(
                jnp.zeros((64, 4096)),
                jnp.ones(64),
                tuple(jnp.asarray(keys)),
                first_token_id=0,
                backend=on,
            )  # fmt: skip
        ],
    )
    yield "exp2: attention", _attention_run(drawn)


def _attention_run(drawn: Callable[..., np.ndarray]) -> Run:
    """Two sequences of 70 queries over up to six pages of cache."""
    queries, pages = drawn(2, 70, 4, 128, scale=2.0), drawn(1, 12, 2, 2, 128, 128)
    table = np.asarray([[3, 0, 7, 9, 11, 5], [1, 8, 2, 10, 4, 6]], np.int32)
    positions = np.arange(70, dtype=np.int32)[None] + np.asarray([[600], [0]], np.int32)

    def run(on: Backend) -> list[jax.Array]:
        place = CachePlace(*map(jnp.asarray, (pages, table, positions)), layer=0)
        q, profile = jnp.asarray(queries), NumericsProfile()
        return [attention(q, place, window=None, profile=profile, backend=on)]

    return run


# ----------------------------------------------------------------------------------------- answers


def _answers(backend: Backend) -> list[AnswerBits]:
    profile = NumericsProfile()
    model, _ = load_on_devices(
        bundled_model_path(), profile=profile, backend=backend.value, dp=1, tp=1
    )
    config = EngineConfig(batch_size=NUM_REQUESTS, prefill_chunk=64, max_len=256, self_check="off")
    requests = make_requests(
        0, vocab_size=model.config.vocab_size, max_len=256, profile=profile, count=NUM_REQUESTS
    )
    return Subject(model, config).answers(requests)


def _compare_answers(backend: Backend) -> BitComparison:
    gc.collect()  # the cache of the engine before
    return compare(_answers(backend), _answers(Backend.REFERENCE))
