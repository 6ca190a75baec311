# SPDX-License-Identifier: Apache-2.0
"""From the body of a request to what the engine is asked, or the reason why it cannot be."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from detjax.serve.answers import Shape
from detjax.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    RefusedError,
    SamplingFields,
    sampling_params,
)
from detjax.serve.receipts import check_receipt
from detjax.serve.service import Service

MAX_PROMPTS = 1024
"""Prompts of one request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One prompt of a request, ready for the engine, and the text that an answer begins with."""

    token_ids: tuple[int, ...]
    echo: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A request, ready for the engine."""

    questions: Sequence[Question]
    shape: Shape
    fields: SamplingFields

    @property
    def has_usage(self) -> bool:
        """Whether a stream ends with a count of tokens."""
        options = self.fields.stream_options
        return options is not None and options.include_usage

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts."""
        return sum(len(question.token_ids) for question in self.questions)


class Reader:
    """Reads requests for one service."""

    def __init__(self, service: Service):
        """For this one."""
        self._service = service

    async def body(self, request: Request) -> bytes:
        """The body, no larger and no later than allowed."""
        limits, body = self._service.limits, bytearray()
        try:
            async with asyncio.timeout(limits.body_s):
                async for part in request.stream():
                    body += part
                    if len(body) > limits.body_bytes:
                        raise RefusedError(
                            f"the body is larger than {limits.body_bytes} bytes",
                            status=413,
                            code="body_too_large",
                        )
        except TimeoutError as error:
            raise RefusedError(
                f"the body did not arrive within {limits.body_s:g} s", status=408, code="timeout"
            ) from error
        return bytes(body)

    def check_model(self, name: str | None) -> None:
        """Refuse another model than the one that is served; None names none."""
        served = self._service.model.name
        if name not in (None, served):
            raise RefusedError(
                f"model {name!r} is not served here; {served!r} is",
                status=404,
                code="model_not_found",
                field="model",
            )

    async def completion(self, asked: CompletionRequest, request_id: str) -> Asked:
        """A request of /v1/completions."""
        self.check_model(asked.model)
        asked.check()
        prompts = asked.prompts()
        if len(prompts) > MAX_PROMPTS:
            raise RefusedError(
                f"prompt has {len(prompts)} prompts, more than {MAX_PROMPTS}", field="prompt"
            )
        questions = []
        for prompt in prompts:
            ids = await self.encode(prompt) if isinstance(prompt, str) else tuple(prompt)
            self._service.check_prompt(ids, asked.max_tokens)
            echo = ""
            if asked.echo:
                is_text = isinstance(prompt, str)
                echo = prompt if is_text else self._service.model.tokenizer.decode(ids)
            questions.append(Question(token_ids=ids, echo=echo))
        shape = self._shape(
            asked,
            max_tokens=asked.max_tokens,
            num_top=asked.logprobs,
            num_scored=asked.num_scored(),
            is_chat=False,
            request_id=request_id,
        )
        return Asked(questions=questions, shape=shape, fields=asked)

    async def chat(self, asked: ChatRequest, request_id: str) -> Asked:
        """A request of /v1/chat/completions."""
        self.check_model(asked.model)
        asked.check()
        ids = await self.template(asked.messages, asked.variables())
        wanted = self._service.check_prompt(ids, asked.max_tokens or asked.max_completion_tokens)
        num_top = (asked.top_logprobs or 0) if asked.logprobs else None
        scored = asked.prompt_logprobs
        shape = self._shape(
            asked, max_tokens=wanted, num_top=num_top, num_scored=scored, is_chat=True,
            request_id=request_id,
        )  # fmt: skip
        return Asked(questions=[Question(token_ids=ids)], shape=shape, fields=asked)

    def _shape(
        self,
        asked: SamplingFields,
        *,
        max_tokens: int,
        num_top: int | None,
        num_scored: int | None,
        is_chat: bool,
        request_id: str,
    ) -> Shape:
        model = self._service.model
        is_deterministic = self._service.check_determinism(asked.is_deterministic)
        if asked.receipt:
            check_receipt(model, is_deterministic=is_deterministic, max_tokens=max_tokens)
        return Shape(
            model=model,
            is_chat=is_chat,
            sampling=sampling_params(
                asked,
                max_tokens=max_tokens,
                num_top=num_top or 0,
                num_scored=num_scored,
                defaults=model.default_sampling,
            ),
            is_deterministic=is_deterministic,
            num_top=num_top,
            has_token_ids=asked.return_token_ids,
            has_logprob_bytes=asked.return_logprob_bytes,
            has_receipt=asked.receipt,
            num_prompt_top=asked.prompt_logprobs,
            request_id=request_id,
        )

    async def encode(self, text: str, *, is_raw: bool = False) -> tuple[int, ...]:
        """The ids of a text; `is_raw`: as it is written, with the special tokens that it has."""
        tokenizer = self._service.model.tokenizer
        encode = tokenizer.encode_raw if is_raw else tokenizer.encode
        # WHY: a thread, as a long prompt takes a second, and others' answers go on meanwhile.
        return tuple(await asyncio.to_thread(encode, text))

    async def template(
        self, messages: Sequence[dict[str, Any]], variables: dict[str, Any]
    ) -> tuple[int, ...]:
        """The ids of a conversation, through the model's template."""
        tokenizer = self._service.model.tokenizer
        try:
            ids = await asyncio.to_thread(
                tokenizer.apply_chat_template, messages, variables=variables
            )
        except ValueError as error:
            raise RefusedError(str(error), field="messages") from error
        return tuple(ids)
