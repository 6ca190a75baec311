# SPDX-License-Identifier: Apache-2.0
"""Continue a data set of prompts on a Ray cluster, and write it with answers and digests.

    python examples/ray_data.py [MODEL] [PROMPTS.txt] [OUT] [REPLICAS] [GPUS]

REPLICAS actors load MODEL, each on GPUS GPUs. If an actor is lost, another answers its rows. No bit
of a row depends on the actor.
"""

import sys
from pathlib import Path

import ray

import detjax
import detjax.ray

arguments = dict(enumerate(sys.argv))
prompts = arguments.get(2, str(Path(__file__).parent / "prompts.txt"))
num_gpus = int(arguments.get(5, "0"))

answered = ray.data.read_text(prompts).map_batches(
    detjax.ray.Generate,
    batch_format="pyarrow",
    batch_size=256,
    concurrency=int(arguments.get(4, "2")),
    num_gpus=num_gpus,
    fn_constructor_kwargs={
        "model": arguments.get(1, "novels-6m"),
        "tp": max(1, num_gpus),
        "max_len": 256,
        "prompt_column": "text",
        "sampling": detjax.SamplingParams(max_tokens=16, temperature=0.8, seed=1),
    },
)
answered.write_parquet(arguments.get(3, "answers"))
