# SPDX-License-Identifier: Apache-2.0
"""A start with kept programs traces and lowers nothing, small programs included."""

import os
import subprocess
import sys

import pytest

START = """
from jax._src.interpreters import pxla
lowered, lower = [], pxla.lower_sharding_computation
pxla.lower_sharding_computation = lambda *a, **k: lowered.append(a[2]) or lower(*a, **k)
import detjax
llm = detjax.LLM("bundled", backend="reference", batch_size=1, max_len=256, show_progress=False)
llm.engine.compile()
llm.generate("The", detjax.SamplingParams(max_tokens=2))
print(len(lowered))
"""


@pytest.mark.slow
def test_the_second_start_lowers_nothing(tmp_path):
    env = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    env |= {"XDG_CACHE_HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    counts = []
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, "-c", START], env=env, capture_output=True, text=True, check=True
        )
        counts.append(int(run.stdout))
    assert counts[0] > 5 and counts[1] == 0
