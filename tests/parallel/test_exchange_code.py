# SPDX-License-Identifier: Apache-2.0
"""The exchange kernels as sm_90a code over a mesh of 8 GPUs, compiled where there is none."""

import json
import subprocess
import sys

import pytest

from detjax.pallas_kernels.linear.tiles import MAX_NORM_ROWS
from detjax.testing import aot

PROGRAM = """
import json, sys
from detjax.testing import aot
aot.start()
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from detjax.numerics import NumericsProfile, tree_reduction
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.exchange import (
    EXCHANGE_SPECS, exchange_add_rms_norm, exchange_choose_token, exchange_shapes,
    linear_exchange_add_rms_norm,
)

topology = topologies.get_topology_desc("h200", "cuda", target_config=aot.H200, topology="1x1x8")
ON = {"eps": 1e-5, "backend": Backend.SM90}

def inspect(rank, tp, width, dtype, arrays, **more):
    mesh = Mesh(np.asarray(topology.devices).reshape(8 // tp, tp), ("dp", "tp"))
    shared = exchange_shapes(
        mesh, width=width, dtype=dtype, backend=Backend.SM90, max_tile_ranks=8, **more
    )
    shapes = [
        jax.ShapeDtypeStruct(dims, kind, sharding=NamedSharding(mesh, spec))
        for spec, kind, dims in arrays
    ]
    step = jax.shard_map(
        rank, mesh=mesh, in_specs=(EXCHANGE_SPECS, *(spec for spec, _, _ in arrays)),
        out_specs=P(), check_vma=False,
    )
    program = aot.inspect_program(jax.jit(step).lower(shared, *shapes).compile)
    return {
        "kernels": [[k.name, k.num_registers, k.spill_bytes] for k in program.kernels],
        "copies": program.copies(least_bytes=1),
        "has_metadata": "uses_xla_collective_metadata = true" in program.hlo,
    }

def of_rows(tp, num_rows, width, num_leaves, has_bias, num_parts):
    parts = [num_parts] if num_parts > 1 else []
    dtype = jnp.float32 if parts else jnp.bfloat16

    def rank(shared, leaves, residual, gain):
        bias = gain if has_bias else None
        return exchange_add_rms_norm(shared, leaves[:, 0], residual, bias, gain, **ON)

    return inspect(rank, tp, width, dtype, [
        (P(None, "tp"), jnp.float32, (num_leaves, tp, *parts, num_rows, width)),
        (P(), dtype, (num_rows, width)), (P(), jnp.bfloat16, (width,)),
    ])

def of_products(tp, num_rows, width, k_len, has_bias):
    reduction = tree_reduction(k_len, NumericsProfile())

    def rank(shared, x, w, residual, gain):
        bias = gain if has_bias else None
        return linear_exchange_add_rms_norm(
            shared, x, w, residual, bias, gain, reduction=reduction, **ON
        )

    columns = P(None, "tp")
    return inspect(rank, tp, width, jnp.bfloat16, [
        (columns, jnp.bfloat16, (num_rows, k_len)), (columns, jnp.bfloat16, (width, k_len)),
        (P(), jnp.bfloat16, (num_rows, width)), (P(), jnp.bfloat16, (width,)),
    ])

def of_choices(tp, num_rows, vocab):
    def rank(shared, logits, temperature, *key):
        return exchange_choose_token(
            shared, logits, temperature, key, vocab_block=128, backend=Backend.SM90
        )

    of_rows = [(P(), kind, (num_rows,)) for kind in (jnp.float32, jnp.uint32, jnp.uint32)]
    logits = P(None, "tp"), jnp.float32, (num_rows, vocab)
    return inspect(rank, tp, 1024, jnp.bfloat16, [logits, *of_rows], padded_vocab=vocab)

made = {"rows": of_rows, "products": of_products, "choices": of_choices}[sys.argv[1]]
print(json.dumps([made(*case) for case in json.loads(sys.argv[2])]))
"""

CASES = [
    (2, 1, 4096, 1, False, 1),
    (2, 128, 4096, 4, True, 1),
    (4, 64, 5120, 2, False, 1),
    (8, 128, 4096, 1, True, 1),
    (8, 8, 8192, 1, False, 1),
    (2, 1, 4096, 4, False, 3),
    (4, 128, 5120, 2, True, 3),
    (8, 128, 4096, 1, True, 3),
]
"""(tp, rows, width, leaf sums of a rank, bias, parts)."""


PRODUCTS = [
    (2, 1, 4096, 4096, False),
    (2, 8, 4096, 14336, True),
    (2, 64, 4096, 14336, False),
    (4, 33, 5120, 13824, True),
    (8, 64, 8192, 28672, False),
    (8, 3, 8192, 28672, False),
]
"""(tp, rows, width, K of all ranks, bias)."""


def compiled(which: str, cases: list) -> list[dict]:
    if (missing := aot.why_unavailable() or aot.why_no_mesh()) is not None:
        pytest.skip(missing)
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, which, json.dumps(cases)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


CHOICES = [(2, 1, 128256), (4, 64, 128512), (8, 300, 152576), (2, 5, 1024)]
"""(tp, rows, tokens of all ranks)."""


@pytest.mark.aot
def test_the_choice_over_ranks_fits_in_registers_and_copies_nothing():
    for case, found in zip(CHOICES, compiled("choices", CHOICES), strict=True):
        names = [name for name, _, _ in found["kernels"]]
        assert names == ["detjax_exchange_choose_token", "detjax_gumbel_argmax"], case
        assert not any(spilled for _, _, spilled in found["kernels"]), case
        assert found["copies"] == [] and not found["has_metadata"], case


@pytest.mark.aot
@pytest.mark.parametrize(
    ("which", "cases", "kernel", "registers"),
    [
        ("rows", CASES, "detjax_exchange_add_rms_norm", 128),
        ("products", PRODUCTS, "detjax_linear", 255),
    ],
)
def test_the_exchange_kernels_fit_in_registers_and_copy_nothing(which, cases, kernel, registers):
    for case, found in zip(cases, compiled(which, cases), strict=True):
        first, *others = found["kernels"]
        assert first[0].startswith(kernel), (case, first)
        is_norm = which == "products" and case[1] > MAX_NORM_ROWS
        assert [name for name, _, _ in others] == ["detjax_rms_norm_wide"] * is_norm, case
        assert first[2] == 0 and first[1] <= registers, (case, first)
        # The slots are written behind XLA's back, so a copy of them would be another's memory.
        assert found["copies"] == [], case
        # That would be a rendezvous and a barrier a call.
        assert not found["has_metadata"], case
