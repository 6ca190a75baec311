# SPDX-License-Identifier: Apache-2.0
"""Answers of a model of one layer, for compute-sanitizer: a prefill in two chunks, then decode."""

import sys

from detjax.pallas_kernels.backend import Backend
from detjax.serving.request import Request, SamplingParams
from detjax.testing.dummies import answers, dummy_config, dummy_model

config = dummy_config(
    num_layers=1, num_heads=8, num_kv_heads=2, head_dim=64, hidden_size=512,
    intermediate_size=1536, vocab_size=1024,
)  # fmt: skip
model = dummy_model(config, backend=Backend(sys.argv[1]))
sampling = SamplingParams(max_tokens=3)
requests = [Request(prompt_token_ids=range(n), sampling=sampling) for n in (5, 130)]
completions = answers(model, requests, batch_size=2, prefill_chunk=96)
print("answered", [len(completion.token_ids) for completion in completions])
