# SPDX-License-Identifier: Apache-2.0
"""The exchange kernel as sm_90a code over a mesh of 8 GPUs, compiled where there is none."""

import json
import subprocess
import sys

import pytest

from detjax.testing import aot

PROGRAM = """
import json, sys
from detjax.testing import aot
aot.start()
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.exchange import EXCHANGE_SPECS, Exchange, exchange_add_rms_norm

topology = topologies.get_topology_desc("h200", "cuda", target_config=aot.H200, topology="1x1x8")
found = []
for tp, num_rows, width, num_leaves, has_bias, num_parts in json.loads(sys.argv[1]):
    mesh = Mesh(np.asarray(topology.devices).reshape(8 // tp, tp), ("dp", "tp"))

    def shape(spec, dtype, *dims):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, spec))

    by_rank = P("dp", "tp")
    shared = Exchange(
        peers=shape(by_rank, jnp.uint32, 8 // tp, tp, tp - 1, 2),
        slots=shape(by_rank, jnp.uint32, 8 // tp, tp, 2, 128, tp - 1, num_parts * width),
        parities=shape(by_rank, jnp.int32, 8 // tp, tp, 128),
    )
    parts = [num_parts] if num_parts > 1 else []
    leaves = shape(P(None, "tp"), jnp.float32, num_leaves, tp, *parts, num_rows, width)
    dtype = jnp.float32 if parts else jnp.bfloat16
    residual = shape(P(), dtype, num_rows, width)
    gain = shape(P(), jnp.bfloat16, width)

    def rank(shared, leaves, residual, gain):
        bias = gain if has_bias else None
        return exchange_add_rms_norm(
            shared, leaves[:, 0], residual, bias, gain, eps=1e-5, backend=Backend.SM90
        )

    step = jax.shard_map(
        rank, mesh=mesh, in_specs=(EXCHANGE_SPECS, P(None, "tp"), P(), P()), out_specs=P(),
        check_vma=False,
    )
    lowered = jax.jit(step).lower(shared, leaves, residual, gain)
    program = aot.inspect_program(lowered.compile)
    found.append({
        "kernels": [[k.name, k.num_registers, k.spill_bytes] for k in program.kernels],
        "copies": program.copies(least_bytes=1),
        "has_metadata": "uses_xla_collective_metadata = true" in program.hlo,
    })
print(json.dumps(found))
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


@pytest.mark.aot
def test_the_exchange_kernel_fits_in_registers_and_copies_nothing():
    if (missing := aot.why_unavailable()) is not None:
        pytest.skip(missing)
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(CASES)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    for case, found in zip(CASES, json.loads(run.stdout), strict=True):
        ((name, registers, spilled),) = found["kernels"]
        assert name.startswith("detjax_exchange_add_rms_norm"), (case, name)
        assert spilled == 0 and registers <= 128, (case, registers, spilled)
        # The slots are written behind XLA's back, so a copy of them would be another's memory.
        assert found["copies"] == [], case
        # That would be a rendezvous and a barrier a call.
        assert not found["has_metadata"], case
