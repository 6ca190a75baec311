# SPDX-License-Identifier: Apache-2.0
"""Token ids in, token ids out, in the shape of vLLM's `/inference/v1/generate`, which SkyRL asks.

A request is a completion of one prompt, and its answer that completion's: the same bits.
"""

from typing import Any

import msgspec

from detjax.server.answers import Json
from detjax.server.errors import RefusedError
from detjax.server.protocol import CompletionRequest, Name, TokenIds
from detjax.server.records import convert

_FINAL_ONLY = 2
"""vLLM's number of an output that comes in one piece."""


class GenerateRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /inference/v1/generate, with vLLM's names.

    Attributes:
        model: The served name; that of the model if left out.
        token_ids: The prompt.
        sampling_params: Fields of `CompletionRequest` that say how tokens are sampled and what is
            told of them; `output_kind` only as 2, `detokenize` for the caller alone.
        request_id: In the answer; the header X-Request-Id if left out.
        priority, cache_salt: As `CompletionRequest` has them.
        stream: Taken only as false.
        features, kv_transfer_params, stream_options: Taken only as null.
    """

    token_ids: TokenIds
    sampling_params: dict[str, Any]
    model: Name | None = None
    request_id: Name = ""
    priority: int = 0
    cache_salt: Name = ""
    stream: bool = False
    features: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    stream_options: dict[str, Any] | None = None

    def as_completion(self, served: str) -> CompletionRequest:
        """The completion that it is, of the model of this name if it has none.

        Raises:
            RefusedError: If it asks for what would have to be ignored.
        """
        for name in ("stream", "features", "kv_transfer_params", "stream_options"):
            if getattr(self, name):
                raise RefusedError(f"{name} is not supported here: leave it out", field=name)
        given = dict(self.sampling_params)
        if given.pop("output_kind", _FINAL_ONLY) not in (_FINAL_ONLY, None):
            raise RefusedError(
                f"output_kind={self.sampling_params['output_kind']!r:.80} is not supported, only "
                f"{_FINAL_ONLY}: the answer comes in one piece",
                field="sampling_params.output_kind",
            )
        given.pop("detokenize", None)
        if taken := sorted(given.keys() & _OWN):
            raise RefusedError(
                f"sampling_params has {taken[0]!r}, which is no sampling; leave it out",
                field=f"sampling_params.{taken[0]}",
            )
        own = {
            "model": served if self.model is None else self.model,
            "prompt": self.token_ids,
            "priority": self.priority,
            "cache_salt": self.cache_salt,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        try:
            return convert(given | own, CompletionRequest)
        except RefusedError as error:
            error.field = f"sampling_params.{error.field}" if error.field in given else error.field
            raise

    def answer(self, completion: Json) -> Json:
        """A completion's answer as this route gives it."""
        return {
            "request_id": self.request_id or completion["id"].partition("-")[2],
            "model": completion["model"],
            "system_fingerprint": completion["system_fingerprint"],
            "choices": [_choice(choice) for choice in completion["choices"]],
            "prompt_logprobs": completion["choices"][0].get("prompt_logprobs"),
            "usage": completion["usage"],
        }


_OWN = frozenset((
    "model", "prompt", "priority", "cache_salt", "return_token_ids", "return_tokens_as_token_ids",
    "echo", "stream", "suffix", "stream_options",
))  # fmt: skip
"""Fields of a completion that are no sampling parameters, or have other names in this shape."""


def _choice(choice: Json) -> Json:
    kept = ("index", "token_ids", "finish_reason", "detjax")
    return {name: choice[name] for name in kept if name in choice} | {
        "logprobs": None if choice["logprobs"] is None else _logprobs(choice["logprobs"])
    }


def _logprobs(of: Json) -> Json:
    """Logprobs of a completion in the shape of a conversation's."""
    content = [
        {"token": token, "logprob": logprob, "top_logprobs": [
            {"token": other, "logprob": value} for other, value in top.items()]}
        for token, logprob, top in zip(
            of["tokens"], of["token_logprobs"], of["top_logprobs"], strict=True)
    ]  # fmt: skip
    return {"content": content}
