# SPDX-License-Identifier: Apache-2.0
"""The bundled model on sm90: the same answers at several batch sizes and chunk lengths."""

import os
import sys
import time

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_allow_excess_precision=false"

from detjax.models.bundled import bundled_model_path
from detjax.models.loading import load_model
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh
from detjax.serving.engine import Engine, EngineConfig
from detjax.serving.request import Request, SamplingParams

model = load_model(
    str(bundled_model_path()),
    profile=NumericsProfile(),
    mesh=make_mesh(1, 1, platform="gpu"),
    backend=Backend.SM90,
)
requests = [
    Request(
        prompt_token_ids=tuple((7 * i + 13 * j) % 4000 + 10 for j in range(length)),
        sampling=SamplingParams(max_tokens=40, temperature=0.8 * (i % 2), seed=i),
    )
    for i, length in enumerate((5, 130, 64, 33, 1, 200, 17))
]
digests = {}
for batch_size, chunk in ((1, 256), (7, 33)):
    start = time.perf_counter()
    engine = Engine(model, EngineConfig(batch_size=batch_size, prefill_chunk=chunk, max_len=256))
    digests[batch_size, chunk] = [c.digest()[:12] for c in engine.generate(requests)]
    print(batch_size, chunk, engine.stats, digests[batch_size, chunk], flush=True)
first = next(iter(digests.values()))
print("all equal:", all(d == first for d in digests.values()), f"{time.perf_counter() - start:.0f}")
sys.exit(0 if all(d == first for d in digests.values()) else 3)
