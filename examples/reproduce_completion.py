# SPDX-License-Identifier: Apache-2.0
"""Write a record of a completion, compute it again in another batch, and compare every bit.

    python examples/reproduce_completion.py [MODEL] [RECORD.json]

Run it again later with the same record: if the fingerprint is the same, so is the digest.
"""

import json
import sys
from pathlib import Path

import detjax

model = sys.argv[1] if len(sys.argv) > 1 else "novels-6m"
record_file = Path(sys.argv[2] if len(sys.argv) > 2 else "completion.json")
sampling = detjax.SamplingParams(max_tokens=24, temperature=0.8, seed=42)

if not record_file.exists():
    alone = detjax.LLM(model, batch_size=1)
    (out,) = alone.generate("The old house by the sea", sampling)
    record_file.write_text(json.dumps(out.outputs[0].as_dict(), indent=1))

record = json.loads(record_file.read_text())
llm = detjax.LLM(model, batch_size=5, prefill_chunk=3)
if record["fingerprint"] != llm.config.fingerprint:
    sys.exit(f"fingerprint {record['fingerprint']} is not this build's {llm.config.fingerprint}")

asked = detjax.SamplingParams.from_dict(record["sampling"])
neighbours = [[5, 6, 7], [8] * 40, [9]]  # token ids of other prompts, which change no bit
*_, again = llm.generate([*neighbours, record["prompt_token_ids"]], asked)
same = again.outputs[0].digest() == record["digest"]
print("recorded", record["digest"], record["text"], sep="\n")
print("again   ", again.outputs[0].digest(), "the same bits" if same else "DIFFERENT")
sys.exit(0 if same else 3)
