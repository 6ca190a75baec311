# SPDX-License-Identifier: Apache-2.0
"""The bits of a Hopper GPU: collect them on one, and compare another backend with them anywhere.

    python -m benchmarks.hopper_bits collect FOLDER                   # on a GPU, under two minutes
    python -m benchmarks.hopper_bits compare FOLDER [--backend NAME]  # on any machine

`collect` writes three files. functions.npz has `ex2.approx`, `rcp.approx` and `rsqrt.approx` on
every significand, and says for each exponent how many of all inputs differ from what these tables
give. cases.npz has the results of `detjax.testing.operation_cases`. answers.npz has token ids and
log-probabilities of whole answers.
"""

import argparse
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from benchmarks.common import Rows, environment
from detjax.engine.outputs.completion import Completion
from detjax.pallas_kernels import sm90_rows as rows
from detjax.pallas_kernels.backend import Backend
from detjax.testing.operation_cases import (
    answer_cases,
    as_bits,
    digest_of,
    family_cases,
    operation_cases,
)

FAMILIES = Path(__file__).parents[1] / "tests" / "golden" / "hf"
OCTAVE = 1 << 23
"""float32 numbers of one sign and exponent."""
PIECE = 2048
FUNCTIONS = {
    "ex2": "ex2.approx.ftz.f32", "rcp": "rcp.approx.ftz.f32",
    "rsqrt": "rsqrt.approx.ftz.f32", "rsqrt_all": "rsqrt.approx.f32",
}  # fmt: skip
INFINITY, NAN = 0x7F800000, 0x7FFFFFFF
ROUNDINGS = ("down", "up", "half up", "half even")
"""Of the magnitude of an input of ex2 to a multiple of 2**-23, as hypotheses."""


@jax.jit
def _first_bits(octave):
    return (octave << 23) + jnp.arange(OCTAVE, dtype=jnp.uint32)


def special_function(name: str):
    """A special function on the bits of one octave: uint32 to uint32."""
    math = rows.strided(PIECE, 4, False)
    op: Callable = rows.instruction(FUNCTIONS[name])

    def body(x_gmem, out_gmem):
        here = pl.ds(lax.axis_index("cta") * PIECE, PIECE)
        out_gmem[here] = math.apply(lambda v: op(v), lambda v: v, math.load(x_gmem.at[here]))

    @jax.jit
    def run(octave):
        x = lax.bitcast_convert_type(_first_bits(octave), jnp.float32)
        out = rows.run_kernel(
            body,
            (x,),
            out=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid={"cta": OCTAVE // PIECE},
            name=f"special_{name}",
            is_interpreted=False,
        )
        return lax.bitcast_convert_type(out, jnp.uint32)

    return lambda octave: run(jnp.uint32(octave))


@jax.jit
def ex2_differences(table, found, octave):
    """How many results of an octave differ from the table's, for each of `ROUNDINGS`."""
    exponent = (octave & 255).astype(jnp.int32)
    significand = lax.iota(jnp.int32, OCTAVE) + jnp.where(exponent > 0, OCTAVE, 0)
    right = jnp.clip(127 - exponent, 0, 30)
    left = jnp.clip(exponent - 127, 0, 7)
    whole = (significand << left) >> right
    rest = significand - (whole << right)
    half = (1 << right) >> 1
    ups = (
        jnp.zeros_like(rest), rest > 0, (rest >= half) & (right > 0),
        (rest > half) | ((rest == half) & (whole & 1 == 1) & (right > 0)),
    )  # fmt: skip

    def differing(up):
        fixed = jnp.where(octave >= 256, -1, 1) * (whole + up.astype(jnp.int32))
        n = jnp.clip(fixed >> 23, -200, 128)
        bits = table[fixed & (OCTAVE - 1)].astype(jnp.int32)
        biased = (bits >> 23) + n
        value = (bits + (n << 23)).astype(jnp.uint32)
        value = jnp.where(biased >= 255, INFINITY, jnp.where(biased <= 0, 0, value))
        is_large = exponent >= 135  # an absolute value of 256 or more
        value = jnp.where(is_large, jnp.where(octave >= 256, 0, INFINITY), value)
        is_nan = (exponent == 255) & (lax.iota(jnp.int32, OCTAVE) > 0)
        return jnp.sum(jnp.where(is_nan, NAN, value) != found)

    return jnp.stack([differing(up) for up in ups])


@jax.jit
def scaled_differences(table, found, shift):
    """How many results differ from those of the table, times a power of two."""
    return jnp.sum((table.astype(jnp.int32) - (shift << 23)).astype(jnp.uint32) != found)


def collect_functions(path: Path) -> None:
    """Write the tables, and the differences of all other inputs from them."""
    tables, differences, found = {}, {}, {}
    ex2, rcp, rsqrt = (special_function(name) for name in ("ex2", "rcp", "rsqrt"))
    ex2_table = ex2(127) - jnp.uint32(1 << 23)
    tables["ex2"] = np.asarray(ex2_table)
    counts = [ex2_differences(ex2_table, ex2(i), jnp.uint32(i)) for i in range(512)]
    differences["ex2"] = np.asarray(jnp.stack(counts))
    for octave in (*range(122, 127), *range(378, 383)):  # should no hypothesis hold
        found[f"found {octave}"] = np.asarray(ex2(octave))
    rcp_table = rcp(127)
    tables["rcp"] = np.asarray(rcp_table)
    counts = [scaled_differences(rcp_table, rcp(i), jnp.int32(i - 127)) for i in range(1, 255)]
    differences["rcp"] = np.asarray(jnp.stack(counts))
    roots = rsqrt(127), rsqrt(128)
    tables["rsqrt"] = np.concatenate([np.asarray(r) for r in roots])
    for name in ("rsqrt", "rsqrt_all"):
        run = special_function(name)
        counts = [
            scaled_differences(roots[(i - 127) % 2], run(i), jnp.int32((i - 127) // 2))
            for i in range(1, 255)
        ]
        differences[name] = np.asarray(jnp.stack(counts))
    steps = {
        name: np.diff(t.astype(np.int64), prepend=0).astype(np.int32) for name, t in tables.items()
    }
    steps |= {k: np.diff(t.astype(np.int64), prepend=0).astype(np.int32) for k, t in found.items()}
    np.savez_compressed(path, **steps, **{f"differences {k}": v for k, v in differences.items()})
    print(
        "ex2: inputs that differ by", dict(zip(ROUNDINGS, differences["ex2"].sum(0), strict=True))
    )
    print("ex2: of positive ones", differences["ex2"][:256].sum(0))
    for name in ("rcp", "rsqrt", "rsqrt_all"):
        exponents = np.nonzero(differences[name])[0] + 1
        print(f"{name}: {differences[name].sum()} differ, exponents {exponents}")


def is_named(name: str, only: str) -> bool:
    """Whether a name has one of the texts of `only`, which has bars between them."""
    return any(part in name for part in only.split("|"))


def results(backend: Backend, only: str = "") -> Iterator[tuple[str, tuple]]:
    """Every case's arrays; a refusal is printed and left out."""
    for name, run in operation_cases().items():
        if not is_named(name, only):
            continue
        try:
            yield name, tuple(np.asarray(array) for array in run(backend))
        except (NotImplementedError, ValueError) as error:
            print(f"{name}: refused: {error}", flush=True)


def model_answers(backend: Backend, only: str = "") -> Iterator[tuple[str, list[Completion]]]:
    """Whole answers of each model, in a batch of four; a refusal is printed and left out."""
    cases = answer_cases() | family_cases(FAMILIES)
    for name, case in cases.items():
        if not is_named(name, only):
            continue
        try:
            yield name, case.answers(backend, batch_size=4)
        except (NotImplementedError, ValueError) as error:
            print(f"{name}: refused: {error}", flush=True)


def collect(folder: Path, only: str) -> None:
    """Write all that a Hopper GPU says, or of cases and answers those whose names have `only`."""
    folder.mkdir(parents=True, exist_ok=True)
    print(jax.devices()[0].device_kind, flush=True)
    begun = time.monotonic()
    if not only:
        collect_functions(folder / "functions.npz")
        print(f"functions after {time.monotonic() - begun:.0f} s", flush=True)
    arrays = {}
    try:
        for name, found in results(Backend.SM90, only):
            arrays |= {f"{name}/{i}": as_bits(array) for i, array in enumerate(found)}
            print(f"{name}: {digest_of(found)}", flush=True)
    finally:
        np.savez_compressed(folder / "cases.npz", **arrays)
    print(f"cases after {time.monotonic() - begun:.0f} s", flush=True)
    arrays = {}
    for name, completions in model_answers(Backend.SM90, only):
        for i, answer in enumerate(completions):
            arrays[f"{name}/{i}/ids"] = np.asarray(answer.token_ids, np.int32)
            arrays[f"{name}/{i}/logprobs"] = np.asarray(answer.logprobs, np.float32)
            print(f"{name} {i}: {answer.digest()[:16]}", flush=True)
        np.savez_compressed(folder / "answers.npz", **arrays)
    print(f"answers after {time.monotonic() - begun:.0f} s", flush=True)


def compare(folder: Path, backend: Backend, only: str, out: Rows) -> int:
    """Keep how many elements of each result differ; return how many results have any."""
    kept, num_different = np.load(folder / "cases.npz"), 0
    for name, found in results(backend, only):
        if f"{name}/0" not in kept:
            print(f"{name}: the GPU refused it", flush=True)
            continue
        pairs = [(as_bits(array), kept[f"{name}/{i}"]) for i, array in enumerate(found)]
        assert all(a.shape == b.shape for a, b in pairs), name
        counts = [int((a != b).sum()) for a, b in pairs]
        num_different += sum(count != 0 for count in counts)
        size = sum(b.size for _, b in pairs)
        out.keep(subject="hopper_bits", case=name, different=sum(counts), elements=size)
    answered = folder / "answers.npz"
    kept = np.load(answered) if answered.exists() else {}
    for name, completions in model_answers(backend, only) if kept else ():
        equal = [_is_kept(answer, kept, f"{name}/{i}") for i, answer in enumerate(completions)]
        num_different += equal.count(False)
        out.keep(
            subject="hopper_answers", case=name, different=equal.count(False),
            answers=sum(one is not None for one in equal),
            tokens=sum(len(answer.token_ids) for answer in completions),
        )  # fmt: skip
    return num_different


def _is_kept(answer: Completion, kept: Mapping[str, np.ndarray], name: str) -> bool | None:
    """Whether an answer has the GPU's tokens and bits; None if the GPU gave none."""
    if f"{name}/ids" not in kept:
        return None
    own = as_bits(np.asarray(answer.logprobs, np.float32))
    same_ids = tuple(kept[f"{name}/ids"]) == tuple(answer.token_ids)
    return same_ids and bool((own == as_bits(kept[f"{name}/logprobs"])).all())


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["collect", "compare"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--backend", default="reference", choices=[b.value for b in Backend])
    parser.add_argument(
        "--only", default="", help="names that contain this text, or one of these with | between"
    )
    parser.add_argument("--out", help="write JSON rows of a comparison here")
    args = parser.parse_args()
    if args.what == "collect":
        # What was found is kept if the time is over.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
        collect(args.folder, args.only)
        return 0
    backend = Backend(args.backend)
    num_different = compare(args.folder, backend, args.only, Rows(environment(backend), args.out))
    print(f"{num_different} results differ")
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
