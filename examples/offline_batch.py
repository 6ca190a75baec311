# SPDX-License-Identifier: Apache-2.0
"""Continue many prompts at once, and write each answer with its logprobs as a line of JSON.

    python examples/offline_batch.py [MODEL] [PROMPTS.txt] > answers.jsonl

The bits of an answer do not depend on the other prompts.
"""

import json
import sys
from pathlib import Path

import detjax

model = sys.argv[1] if len(sys.argv) > 1 else "novels-6m"
prompts = Path(sys.argv[2] if len(sys.argv) > 2 else Path(__file__).parent / "prompts.txt")

llm = detjax.LLM(model)
print(llm.config, file=sys.stderr)

sampling = detjax.SamplingParams(
    max_tokens=16,
    temperature=0.8,
    top_p=0.95,
    seed=1,
    stop=("\n",),
    logprobs=3,
)
for out in llm.generate(prompts.read_text().splitlines(), sampling):
    for done in out.outputs:
        print(json.dumps({"prompt": out.prompt, **done.as_dict()}, ensure_ascii=False))
