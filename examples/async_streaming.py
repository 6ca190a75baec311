# SPDX-License-Identifier: Apache-2.0
"""Stream several answers at once with asyncio. One consumer stops early, which aborts its request.

    python examples/async_streaming.py [MODEL]

The engine returns tokens. `TextStream` decodes them to whole characters and finds stop strings.
"""

import asyncio
import contextlib
import sys

import detjax
from detjax.engine.outputs.text import TextStream

llm = detjax.LLM(sys.argv[1] if len(sys.argv) > 1 else "novels-6m", batch_size=4)
engine = detjax.AsyncEngine(llm.engine)


async def answer(name: str, prompt: str, *, most_tokens: int) -> str:
    """Print a text as it grows; end it at a stop string or after `most_tokens`."""
    ids = llm.tokenizer.encode(prompt)
    sampling = detjax.SamplingParams(max_tokens=48, temperature=0.7, seed=5)
    text, stream = "", TextStream(llm.tokenizer, ("THE END",), prompt_ids=ids)
    num_tokens = 0
    async with contextlib.aclosing(engine.stream(ids, sampling)) as outputs:
        async for output in outputs:
            deltas = [stream.push(token_id) for token_id in output.token_ids]
            text += "".join(delta.text for delta in deltas)
            num_tokens += len(deltas)
            print(f"{name}: {text!r}")
            if num_tokens >= most_tokens or any(delta.is_stopped for delta in deltas):
                break  # leaving the stream cancels what is left of the request
    return text + stream.finish()


async def main() -> None:
    """Ask twice at once."""
    await asyncio.gather(
        answer("whole", "It was late", most_tokens=1000),
        answer("cancelled", "The sea", most_tokens=6),
    )
    await engine.drain()
    print(f"{llm.engine.stats().num_cancelled} cancelled")


asyncio.run(main())
