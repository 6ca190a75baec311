# SPDX-License-Identifier: Apache-2.0
"""What to write in place of an option of vLLM that the server does not have."""

from collections.abc import Sequence
from typing import NamedTuple


class _Answer(NamedTuple):
    """Why there is no such option, and what to use; None where it is only to be left out."""

    reason: str
    use: str | None = None


_BY_TEMPLATE = _Answer("calls and reasoning are read as the model's chat template writes them")
_NO_TEXT = _Answer("texts of requests are logged only with --log-prompts")

IN_PLACE_OF = {
    "--block-size": _Answer("a page of the cache has 128 tokens"),
    "--cpu-offload-gb": _Answer("a server that answers has all weights in the memory of the GPU"),
    "--disable-log-requests": _NO_TEXT,
    "--distributed-executor-backend": _Answer(
        "a process drives all its GPUs, and --coordinator joins several"
    ),
    "--enable-auto-tool-choice": _BY_TEMPLATE,
    "--enable-chunked-prefill": _Answer("prompts are always computed in chunks"),
    "--enable-log-requests": _Answer("it also logs the text of each prompt", "--log-prompts"),
    "--enable-prefix-caching": _Answer("the prefix cache is always on"),
    "--enforce-eager": _Answer("programs are then compiled when first needed", "--no-compile"),
    "--load-format": _Answer("weights are read from safetensors"),
    "--no-enable-log-requests": _NO_TEXT,
    "--no-enable-prefix-caching": _Answer("the cache is always on", "a cache_salt in each request"),
    "--pipeline-parallel-size": _Answer("GPUs share each layer, or have replicas", "--tp or --dp"),
    "--quantization": _Answer("the scheme is read from the checkpoint"),
    "--reasoning-parser": _BY_TEMPLATE,
    "--seed": _Answer("each request gives its own", "the field seed"),
    "--swap-space": _Answer("keys and values stay in the memory of the GPU"),
    "--tokenizer": _Answer("the tokenizer is that of the model"),
    "--tool-call-parser": _BY_TEMPLATE,
    "--trust-remote-code": _Answer("no code of a checkpoint is run"),
}
"""Options of `vllm serve` 0.26."""


def hints(words: Sequence[str]) -> list[str]:
    """What to do about each of vLLM's options among words that the server does not know."""
    found = {}
    for word in words:
        flag = word.partition("=")[0].replace("_", "-")
        if answer := IN_PLACE_OF.get(flag):
            how = f"use {answer.use} in place of {flag}" if answer.use else f"leave {flag} out"
            found[flag] = f"{how}, as {answer.reason}"
    return list(found.values())
