# SPDX-License-Identifier: Apache-2.0
"""Answers of a model of one layer, for compute-sanitizer: a prefill in two chunks, then decode.

It says how far it is: under the sanitizer a stage may take minutes.
"""

import sys
import time

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.pallas_kernels.backend import Backend
from detjax.testing.dummies import dummy_config, dummy_model

CONFIG = dummy_config(
    num_layers=1, num_heads=8, num_kv_heads=2, head_dim=64, hidden_size=512,
    intermediate_size=1536, vocab_size=1024,
)  # fmt: skip
REQUESTS = [
    Request(prompt_token_ids=tuple(range(n)), sampling=SamplingParams(max_tokens=3))
    for n in (5, 130)
]

begin = time.time()


def tell(stage: str) -> None:
    print(f"{time.time() - begin:.0f} s: {stage}", flush=True)


tell("imported")
model = dummy_model(CONFIG, backend=Backend(sys.argv[1]))
tell("weights are placed")
engine = Engine(model, EngineConfig(batch_size=2, prefill_chunk=96, max_len=384))
engine.compile(lambda name, done, total: tell(f"compiled {name}"))
completions = engine.generate(REQUESTS)
tell(f"answered {[len(completion.token_ids) for completion in completions]}")
