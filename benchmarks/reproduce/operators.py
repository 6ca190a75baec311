# SPDX-License-Identifier: Apache-2.0
"""Which operators of which library keep a row's bits when the batch grows?"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks.reproduce.experiment import Experiment, Lab, Part, Result, Row
from detjax.numerics import NumericsProfile, tree_reduction
from detjax.pallas_kernels.attention.api import attention
from detjax.pallas_kernels.linear.api import linear, linear_partial
from detjax.pallas_kernels.log_softmax.api import block_stats, log_sum_exp
from detjax.pallas_kernels.paged_cache import CachePlace
from detjax.pallas_kernels.rms_norm.api import rms_norm
from detjax.pallas_kernels.swiglu.api import swiglu
from detjax.parallel.collectives import butterfly_sum
from detjax.parallel.mesh import TP_AXIS, make_mesh
from detjax.plots import CHANGED, UNCHANGED, finish
from detjax.testing.bitwise import raw_bits, wide

EPS = 1e-5
PAGE = 128


@dataclass(frozen=True, kw_only=True, eq=False)
class Operator:
    """One operator: what its rows are made of, and who computes it.

    Attributes:
        name: Of the row in the table.
        shape: Of a row, and of what all rows share.
        rows: Arrays whose first axis is the batch, bfloat16 or float32.
        shared: The others.
        by_library: `f(rows, shared)`, for jax arrays; `torch` functions take tensors.
    """

    name: str
    shape: str
    rows: tuple[np.ndarray, ...]
    shared: tuple[np.ndarray, ...]
    by_library: dict[str, Callable[..., Any]]


def _makers(lab: Lab) -> dict[str, Callable[[int], Operator]]:
    """Name of each case, and what makes it for so many rows."""

    def rng():  # of each case its own, so that its data do not depend on which others ran
        return np.random.default_rng(0)

    makers: dict[str, Callable[[int], Operator]] = {}
    for k, n in lab.pick(((768, 256), (1000, 128), (4096, 512)), ((4096, 6144), (14336, 4096))):
        makers[f"matmul {k}"] = lambda most, k=k, n=n: _matmul(lab, rng(), most, k, n)
    makers["RMSNorm"] = lambda most: _rms_norm(lab, rng(), most, lab.pick(768, 4096))
    makers["log-sum-exp"] = lambda most: _log_sum_exp(
        lab, rng(), min(most, 256), lab.pick(4096, 128256)
    )
    makers["SwiGLU"] = lambda most: _swiglu(lab, rng(), most, lab.pick(768, 14336))
    makers["attention"] = lambda _: _attention(lab, rng(), lab.pick(16, 64), lab.pick(300, 2000))
    makers["control"] = lambda most: _by_place(rng(), min(most, 64), 512)
    if lab.num_devices >= 4:
        makers["all-reduce"] = lambda most: _all_reduce(lab, rng(), most, lab.pick(256, 4096))
    return makers


def _matmul(lab: Lab, rng, most: int, k: int, n: int) -> Operator:
    backend, reduction = lab.backend, tree_reduction(k, NumericsProfile())
    x, w = wide(rng, (most, k)), wide(rng, (n, k), 0.5) / k**0.5

    def ours(x, w):
        if reduction.num_leaves > 1:
            return linear_partial(x, w, reduction=reduction, backend=backend)
        return linear(x, w, out_dtype=jnp.dtype(jnp.float32), backend=backend)

    def xla(x, w):
        return jnp.dot(x, w.T, preferred_element_type=jnp.float32)

    return Operator(
        name="matmul", shape=f"K {k}, N {n}", rows=(x,), shared=(w,),
        by_library={"detjax": ours, "XLA": xla, "torch": lambda x, w: x @ w.T},
    )  # fmt: skip


def _rms_norm(lab: Lab, rng, most: int, width: int) -> Operator:
    x, gain = wide(rng, (most, width)), wide(rng, (width,), 0.1)

    def xla(x, gain):
        v = x.astype(jnp.float32)
        out = v * lax.rsqrt(jnp.mean(v * v, axis=1, keepdims=True) + EPS)
        return (out * gain.astype(jnp.float32)[None]).astype(x.dtype)

    def torch_norm(x, gain):
        import torch

        return torch.nn.functional.rms_norm(x, (width,), gain, EPS)

    return Operator(
        name="RMSNorm", shape=f"D {width}", rows=(x,), shared=(gain,),
        by_library={
            "detjax": lambda x, gain: rms_norm(x, gain, eps=EPS, backend=lab.backend),
            "XLA": xla, "torch": torch_norm,
        },
    )  # fmt: skip


def _log_sum_exp(lab: Lab, rng, most: int, vocab: int) -> Operator:
    logits = 8 * rng.standard_normal((most, vocab)).astype(np.float32)

    def ours(logits):
        stats = block_stats(logits, vocab_block=128, backend=lab.backend)
        return log_sum_exp(*stats, backend=lab.backend)

    def torch_lse(logits):
        import torch

        return torch.logsumexp(logits, dim=1)

    return Operator(
        name="log-sum-exp", shape=f"V {vocab}", rows=(logits,), shared=(),
        by_library={
            "detjax": ours, "XLA": lambda x: jax.nn.logsumexp(x, axis=1), "torch": torch_lse,
        },
    )  # fmt: skip


def _swiglu(lab: Lab, rng, most: int, width: int) -> Operator:
    def xla(x):
        gate, up = jnp.split(x.astype(jnp.float32), 2, axis=1)
        return (jax.nn.silu(gate) * up).astype(x.dtype)

    def torch_swiglu(x):
        import torch

        gate, up = x.float().chunk(2, dim=1)
        return (torch.nn.functional.silu(gate) * up).to(x.dtype)

    return Operator(
        name="SwiGLU", shape=f"F {width}", rows=(wide(rng, (most, 2 * width), 1.0),), shared=(),
        by_library={
            "detjax": lambda x: swiglu(x, backend=lab.backend), "XLA": xla, "torch": torch_swiglu,
        },
    )  # fmt: skip


def _attention(lab: Lab, rng, most: int, context: int) -> Operator:
    """One new token a sequence, over `context` keys of its own."""
    heads, kv_heads, channels = 8, 2, 64
    q = rng.standard_normal((most, heads, channels)).astype(np.float32)
    k, v = rng.standard_normal((2, most, context, kv_heads, channels)).astype(np.float32)

    def ours(q, k, v):
        batch, blocks = q.shape[0], -(-context // PAGE)
        pad = ((0, 0), (0, blocks * PAGE - context), (0, 0), (0, 0))
        kv = jnp.stack([jnp.pad(x, pad) for x in (k, v)], axis=1)
        pages = kv.reshape(batch, 2, blocks, PAGE, kv_heads, channels)
        pages = pages.transpose(0, 2, 1, 4, 3, 5).reshape(1, -1, 2, kv_heads, PAGE, channels)
        table = jnp.arange(batch * blocks, dtype=jnp.int32).reshape(batch, blocks)
        positions = jnp.full((batch, 1), context - 1, jnp.int32)
        out = attention(
            q[:, None],
            CachePlace(pages, table, positions, layer=0),
            window=None,
            profile=NumericsProfile(),
            backend=lab.backend,
        )
        return out[:, 0]

    def xla(q, k, v):
        return jax.nn.dot_product_attention(q[:, None], k, v)[:, 0]

    def torch_attention(q, k, v):
        import torch

        q, k, v = (x.transpose(1, 2) for x in (q[:, None], k, v))
        run = torch.nn.functional.scaled_dot_product_attention
        return run(q, k, v, enable_gqa=True)[:, :, 0]

    return Operator(
        name="attention, decode", shape=f"{heads}/{kv_heads} heads x {channels}, {context} keys",
        rows=(q, k, v), shared=(),
        by_library={"detjax": ours, "XLA": xla, "torch": torch_attention},
    )  # fmt: skip


def _by_place(rng, most: int, width: int) -> Operator:
    """The control: a sum in order, which begins where the row stands in the batch."""

    def control(x):
        rolled = jax.vmap(jnp.roll)(x, jnp.arange(len(x)))
        total, _ = lax.scan(lambda acc, term: (acc + term, None), jnp.zeros(len(x)), rolled.T)
        return total

    return Operator(
        name="sum from the row's place on", shape=f"D {width}, float32",
        rows=(wide(rng, (most, width)),), shared=(), by_library={"control": control},
    )  # fmt: skip


def _all_reduce(lab: Lab, rng, most: int, width: int) -> Operator:
    """Four ranks' partial sums; the messages grow with the batch."""
    mesh = make_mesh(1, 4, platform=lab.backend.platform)

    def on_mesh(add):
        return jax.shard_map(
            lambda x: add(x[:, 0]), mesh=mesh, in_specs=P(None, TP_AXIS), out_specs=P(),
            check_vma=False,
        )  # fmt: skip

    return Operator(
        name="all-reduce, tp 4", shape=f"D {width}, float32",
        rows=(wide(rng, (most, 4, width)),), shared=(),
        by_library={
            "detjax": on_mesh(lambda x: butterfly_sum(x, TP_AXIS, 4, backend=lab.backend)),
            "XLA": on_mesh(lambda x: lax.psum(x, TP_AXIS)),  # noqa: TID251 - the rival
        },
    )  # fmt: skip


FLOAT32 = ("log-sum-exp", "all-reduce, tp 4", "sum from the row's place on")


def _outputs(
    operator: Operator, library: str, count: int, places: np.ndarray | None = None
) -> np.ndarray:
    """The first `count` rows, computed together; `places` says which stands where."""
    rows = [x[:count] if places is None else x[:count][places] for x in operator.rows]
    is_narrow = operator.name not in FLOAT32
    if library == "torch":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.bfloat16 if is_narrow else torch.float32
        tensors = [torch.from_numpy(x).to(device, dtype) for x in (*rows, *operator.shared)]
        with torch.no_grad():
            return operator.by_library["torch"](*tensors).float().cpu().numpy()
    dtype = jnp.bfloat16 if is_narrow else jnp.float32
    arrays = [jnp.asarray(x, dtype) for x in (*rows, *operator.shared)]
    return np.asarray(_jitted(operator, library)(*arrays))


@cache
def _jitted(operator: Operator, library: str) -> Callable:
    return jax.jit(operator.by_library[library])


def _compare(operator: Operator, library: str, counts: list[int]) -> dict[str, Any]:
    """Rows computed among few against the same rows among most, and at other places."""
    expected = raw_bits(_outputs(operator, library, counts[-1]))
    changed_sizes, rows_changed, elements_changed, bits_changed, compared = 0, 0, 0, 0, 0
    rows_moved, moved_sizes = 0, 0
    for count in counts:
        found = raw_bits(_outputs(operator, library, count))
        if count > 1:
            places = np.random.default_rng(count).permutation(count)
            moved = raw_bits(_outputs(operator, library, count, places))
            is_other = (moved != found[places]).reshape(count, -1).any(axis=1)
            rows_moved += int(is_other.sum())
            moved_sizes += bool(is_other.any())
        if count == counts[-1]:
            break
        different = (found != expected[:count]).reshape(count, -1)
        changed_sizes += bool(different.any())
        rows_changed += int(different.any(axis=1).sum())
        compared += count
        elements_changed += int(different.sum())
        bits_changed += int(np.bitwise_count(found ^ expected[:count]).sum())
    num_moved = sum(count for count in counts if count > 1)
    return {
        "operator": operator.name,
        "library": library,
        "shape": operator.shape,
        "batch_invariant": "no" if changed_sizes else "yes",
        "position_invariant": "no" if moved_sizes else "yes",
        "batch_sizes_changed": f"{changed_sizes} of {len(counts) - 1}",
        "rows_changed": f"{rows_changed} of {compared}",
        "rows_changed_by_place": f"{rows_moved} of {num_moved}",
        "elements_changed": elements_changed,
        "bits_changed": bits_changed,
        "wrong": changed_sizes + moved_sizes if library == "detjax" else 0,
    }


def _batch_sizes(lab: Lab) -> list[int]:
    return lab.pick([1, 2, 7, 32, 100], [1, 8, 17, 64, 128, 500, 1024])


def _rows(lab: Lab, make: Callable[[int], Operator]) -> list[Row]:
    """Each library's row of an operator."""
    counts = _batch_sizes(lab)
    operator = make(counts[-1])
    most = operator.rows[0].shape[0]
    own = [count for count in counts if count < most] + [most]
    has_torch = importlib.util.find_spec("torch") is not None
    return [
        _compare(operator, library, own)
        for library in operator.by_library
        if library != "torch" or has_torch
    ]


def _share(row: Row, name: str) -> float:
    """Percent of a cell such as "3 of 10"."""
    changed, _, compared = row[name].split()
    return 100 * int(changed) / int(compared)


def plot(figure, rows: Sequence[Row]) -> None:
    """A table: the share of rows whose bits change with the batch size, and with their place."""
    panels = figure.subplots(1, 2, sharey=True)
    libraries = list(dict.fromkeys(row["library"] for row in rows))
    names = list(dict.fromkeys((row["operator"], row["shape"]) for row in rows))
    titles = {
        "rows_changed": "Rows that change with the batch size, %",
        "rows_changed_by_place": "... with their place in the batch, %",
    }
    for axes, (column, title) in zip(panels, titles.items(), strict=True):
        shares = np.full((len(names), len(libraries)), np.nan)
        for row in rows:
            at = names.index((row["operator"], row["shape"])), libraries.index(row["library"])
            shares[at] = _share(row, column)
        axes.imshow(np.where(shares[..., None] > 0, CHANGED, UNCHANGED), aspect="auto")
        for (line, place), share in np.ndenumerate(shares):
            text = "" if np.isnan(share) else f"{share:.3g}"
            axes.text(place, line, text, ha="center", va="center")
        axes.set_xticks(range(len(libraries)), libraries)
        axes.tick_params(length=0)
        axes.grid(visible=False)
        finish(axes, title=title, x="", y="", legend=False)
    panels[0].set_yticks(range(len(names)), [f"{a}, {b}" for a, b in names])


def findings(rows: Sequence[Row]) -> list[str]:
    """Cases of each library that change with the size of the batch, and with the place in it."""
    told = []
    for library in dict.fromkeys(row["library"] for row in rows):
        own = [row for row in rows if row["library"] == library]
        sizes, places = (
            sum(row[name] == "no" for row in own)
            for name in ("batch_invariant", "position_invariant")
        )
        told.append(
            f"{library}: of {len(own)} cases {sizes} change with the batch size, {places} with the "
            "place in the batch"
        )
    return told


def result(rows: Sequence[Row], setting: str) -> Result:
    """Tables and sentences of the rows."""
    return Result(
        title="Rows computed in batches of several sizes, and at other places of the batch",
        setting=setting,
        columns=(
            "operator", "library", "shape", "batch_invariant", "position_invariant",
            "batch_sizes_changed", "rows_changed", "rows_changed_by_place", "bits_changed",
        ),
        rows=rows,
        findings=findings(rows),
        plot=lambda figure: plot(figure, rows),
    )  # fmt: skip


def parts(lab: Lab) -> list[Part]:
    """A piece for each operator."""
    return [
        Part(name=name, seconds=15, run=lambda make=make: _rows(lab, make))
        for name, make in _makers(lab).items()
    ]


EXPERIMENT = Experiment(
    question="Which common operators are batch-invariant, by library, and position-invariant?",
    paper="LLM-42 (arXiv:2601.17768), figure 7 and table 2: most kernels reduce in an order that "
    "the shape alone decides. So they change with the batch size and with nothing else.",
    parts=parts,
    result=result,
    setting=lambda lab, _: f"random data of wide exponents; {lab.machine}",
)
