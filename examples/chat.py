# SPDX-License-Identifier: Apache-2.0
"""Hold a conversation of two turns with a model that has a chat template.

    python examples/chat.py                     # the bundled model, which only continues text
    python examples/chat.py Qwen/Qwen3-0.6B     # downloaded once

Special tokens in the text of a message are treated as plain text.
"""

import sys

import detjax

llm = detjax.LLM(sys.argv[1] if len(sys.argv) > 1 else "novels-6m")
sampling = detjax.SamplingParams(max_tokens=32, temperature=0.6, top_p=0.95, top_k=20, seed=7)

messages = [{"role": "system", "content": "Answer in one sentence."}]
for question in ("Why is the sky blue?", "And at sunset?"):
    messages.append({"role": "user", "content": question})
    # What else this template knows goes in by name; other templates ignore it.
    (out,) = llm.chat(messages, sampling, chat_template_kwargs={"enable_thinking": False})
    answer = out.outputs[0]
    messages.append({"role": "assistant", "content": answer.text})
    print(f"user: {question}\nassistant: {answer.text}\ndigest: {answer.digest()}\n")
