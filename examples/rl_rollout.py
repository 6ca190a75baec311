# SPDX-License-Identifier: Apache-2.0
"""Sample with the engine and train on the samples, with the same log-probabilities, bit for bit.

    pip install -e ".[train]" && python examples/rl_rollout.py [MODEL]

Two updates of REINFORCE on sums. The ratio of the two policies is exactly 1, without clipping.
"""

import sys

import numpy as np
import optax

import detjax
from detjax.training.batch import Scored, by_sequence, pack
from detjax.training.trainer import Trainer
from detjax.training.weights import serving_params

llm = detjax.LLM(sys.argv[1] if len(sys.argv) > 1 else "novels-6m", max_len=128)
trainer = Trainer(llm.model, optax.adam(1e-5), mesh=llm.model.mesh, clip_norm=1.0)
state = trainer.init()

for step in range(2):
    llm.engine.load_weights(serving_params(state.params, llm.model), version=step)
    sampling = detjax.SamplingParams(max_tokens=4, temperature=1.0, seed=step, n=4)
    outs = llm.generate(["17+26=", "30+41="], sampling)
    samples = [done.completion for out in outs for done in out.outputs]
    rewards = np.array([done.text.startswith(("43", "71")) for o in outs for done in o.outputs])
    batch = pack(
        [
            Scored(
                token_ids=s.prompt_token_ids + s.token_ids,
                weights=(0.0,) * len(s.prompt_token_ids) + (float(advantage),) * len(s.token_ids),
            )
            for s, advantage in zip(samples, rewards - rewards.mean(), strict=True)
        ],
        length=32,
    )
    state, output = trainer.step(state, [batch])
    trained = by_sequence(batch, output.logprobs[0])
    for sample, row in zip(samples, trained, strict=True):
        of_trainer = row[len(sample.prompt_token_ids) - 1 :].astype(np.float32)
        assert of_trainer.tobytes() == np.stack(sample.logprobs).tobytes()
    print(f"step {step}: {len(samples)} samples, reward {rewards.mean():.2f}, every bit equal")
