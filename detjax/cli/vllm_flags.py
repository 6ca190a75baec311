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
_AHEAD = _Answer("steps are planned ahead wherever drafts allow it")
_OF_CHECKPOINT = _Answer("the configuration is read from there", "config.json of the checkpoint")
_COMPILED = _Answer("programs are compiled in one way, as another would change bits")
_ONE_LIBRARY = _Answer("all grammars are compiled by llguidance")
_TEXT_ALONE = _Answer("only text is read")
_GENERATES = _Answer("the server only generates")

IN_PLACE_OF = {
    "--async-scheduling": _AHEAD,
    "--attention-backend": _Answer("each kind of GPU has one set of kernels"),
    "--block-size": _Answer("a page of the cache has 128 tokens"),
    "--compilation-config": _COMPILED,
    "--cpu-offload-gb": _Answer("a server that answers has all weights in the memory of the GPU"),
    "--disable-log-requests": _NO_TEXT,
    "--distributed-executor-backend": _Answer(
        "a process drives all its GPUs, and --coordinator joins several"
    ),
    "--download-dir": _Answer(
        "models are kept where huggingface_hub keeps them", "the environment variable HF_HOME"
    ),
    "--enable-auto-tool-choice": _BY_TEMPLATE,
    "--enable-chunked-prefill": _Answer("prompts are always computed in chunks"),
    "--enable-expert-parallel": _Answer("a rank of --tp always has whole experts"),
    "--enable-log-requests": _Answer("it also logs the text of each prompt", "--log-prompts"),
    "--enable-prefix-caching": _Answer("the prefix cache is always on"),
    "--enable-prompt-tokens-details": _Answer("an answer's usage always has them"),
    "--enable-sleep-mode": _Answer("the routes /sleep and /wake_up need a key", "--admin-api-key"),
    "--enforce-eager": _Answer("programs are then compiled when first needed", "--no-compile"),
    "--guided-decoding-backend": _ONE_LIBRARY,
    "--hf-overrides": _OF_CHECKPOINT,
    "--hf-token": _Answer(
        "everybody on a host can read its command lines", "the environment variable HF_TOKEN"
    ),
    "--language-model-only": _TEXT_ALONE,
    "--limit-mm-per-prompt": _TEXT_ALONE,
    "--load-format": _Answer("weights are read from safetensors"),
    "--logprobs-mode": _Answer("each request chooses raw or processed", "the field logprobs_mode"),
    "--max-logprobs": _Answer("a request may ask for 64 of each token"),
    "--no-async-scheduling": _AHEAD,
    "--no-enable-log-requests": _NO_TEXT,
    "--no-enable-prefix-caching": _Answer("the cache is always on", "a cache_salt in each request"),
    "--num-scheduler-steps": _Answer("a launch may have several steps", "--decode-steps"),
    "--optimization-level": _COMPILED,
    "--override-generation-config": _Answer(
        "defaults are read from there", "generation_config.json of the checkpoint"
    ),
    "--pipeline-parallel-size": _Answer("GPUs share each layer, or have replicas", "--tp or --dp"),
    "--quantization": _Answer("the scheme is read from the checkpoint"),
    "--reasoning-parser": _BY_TEMPLATE,
    "--return-tokens-as-token-ids": _Answer(
        "each request chooses", "the field return_tokens_as_token_ids"
    ),
    "--rope-scaling": _OF_CHECKPOINT,
    "--runner": _GENERATES,
    "--scheduling-policy": _Answer("a request's priority always counts"),
    "--seed": _Answer("each request gives its own", "the field seed"),
    "--structured-outputs-config": _ONE_LIBRARY,
    "--swap-space": _Answer("keys and values stay in the memory of the GPU"),
    "--task": _GENERATES,
    "--tokenizer": _Answer("the tokenizer is that of the model"),
    "--tokenizer-mode": _Answer("the tokenizer is that of the model"),
    "--tool-call-parser": _BY_TEMPLATE,
    "--trust-remote-code": _Answer("no code of a checkpoint is run"),
}
"""Options of `vllm serve` 0.26."""

SAME_VALUES = {"--generation-config: invalid choice: 'vllm'": "none"}
"""How a message begins of a value of vLLM that has another name here, and that name."""


def hints(words: Sequence[str]) -> list[str]:
    """What to do about each of vLLM's options among words that the server does not know."""
    found = {}
    for word in words:
        flag = word.partition("=")[0].replace("_", "-")
        if answer := IN_PLACE_OF.get(flag):
            how = f"use {answer.use} in place of {flag}" if answer.use else f"leave {flag} out"
            found[flag] = f"{how}, as {answer.reason}"
    return list(found.values())


def hint_of_value(message: str) -> str:
    """What to write in place of a value of vLLM; nothing if a message is of no such value."""
    found = [ours for begin, ours in SAME_VALUES.items() if message.startswith(begin)]
    return f"; use {found[0]}, which is the same" if found else ""
