# SPDX-License-Identifier: Apache-2.0
"""Run one engine over several processes. Only process 0 receives the requests.

    python examples/replicated_engine.py localhost:9000 2 0 &   # address, processes, process id
    python examples/replicated_engine.py localhost:9000 2 1

tp is the number of processes, and each process has one device of the mesh.
"""

import asyncio
import sys

import detjax
from detjax.engine.replicated_engine import follow
from detjax.parallel.distributed import start_job
from detjax.parallel.job_spec import JobSpec

try:
    coordinator, num_processes, process_id = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
except (IndexError, ValueError):
    sys.exit(f"give ADDRESS PROCESSES PROCESS_ID, such as: python {sys.argv[0]} localhost:9000 2 0")
job = JobSpec(coordinator=coordinator, num_processes=num_processes, process_id=process_id)
watch = start_job(job)
with watch.working():
    llm = detjax.LLM("novels-6m", tp=num_processes, num_processes=num_processes, max_len=256)


async def ask(engine: detjax.AsyncEngine, prompt: str) -> str:
    """Continue a prompt; the text."""
    ids = []
    async for output in engine.stream(
        llm.tokenizer.encode(prompt), detjax.SamplingParams(max_tokens=16)
    ):
        ids += output.token_ids
    return llm.tokenizer.decode(ids)


async def serve(engine: detjax.AsyncEngine) -> None:
    """Several prompts at once, as they would come from users."""
    prompts = ("The old house by the sea", "It was late", "17+26=")
    for prompt, text in zip(
        prompts, await asyncio.gather(*(ask(engine, prompt) for prompt in prompts)), strict=True
    ):
        print(f"{prompt}:{text}")


if process_id == 0:
    replicated = detjax.ReplicatedEngine(llm.engine, watch)
    asyncio.run(serve(detjax.AsyncEngine(replicated)))
    replicated.close()
else:
    follow(llm.engine, watch)
