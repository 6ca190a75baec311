# SPDX-License-Identifier: Apache-2.0
"""Continue a data set of prompts on a Ray cluster, and write it with answers and digests.

    python examples/ray_data.py [MODEL] [PROMPTS.txt] [OUT] [REPLICAS] [GPUS]

REPLICAS actors load MODEL, each on GPUS GPUs. If an actor is lost, another answers its rows. No bit
of a row depends on the actor. Each actor holds one CPU, and the tasks that read and write need
another. The default is two replicas, or one on a machine with two CPUs.
"""

import sys
from pathlib import Path

import ray

import detjax
import detjax.ray

arguments = dict(enumerate(sys.argv))
prompts = arguments.get(2, str(Path(__file__).parent / "prompts.txt"))
num_gpus = int(arguments.get(5, "0"))
ray.init()
num_cpus = int(ray.cluster_resources().get("CPU", 0))
num_replicas = int(arguments.get(4, max(1, min(2, num_cpus - 1))))
if num_cpus <= num_replicas:  # Ray would wait without end
    sys.exit(
        f"{num_replicas} replicas and a task that reads take {num_replicas + 1} CPUs, and Ray has "
        f"{num_cpus}; give fewer REPLICAS, or start Ray with more: ray start --head --num-cpus "
        f"{num_replicas + 1}"
    )
answered = ray.data.read_text(prompts).map_batches(
    detjax.ray.Generate,
    batch_format="pyarrow",
    batch_size=256,
    concurrency=num_replicas,
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
