# SPDX-License-Identifier: Apache-2.0
"""From the body of a request to what the engine is asked, or the reason why it cannot be."""

import asyncio
import dataclasses
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request

from detjax.engine.requests.sampling_params import last_tokens
from detjax.models.tokenizer import LOOKED_AT
from detjax.server.answer_reader import AnswerSyntax
from detjax.server.answers import Shape
from detjax.server.chat_request import ChatRequest
from detjax.server.errors import RefusedError
from detjax.server.protocol import CompletionRequest, SamplingFields, TokenIds, sampling_params
from detjax.server.receipts import check_receipt
from detjax.server.records import parse, read_query
from detjax.server.served_adapters import ServedAdapter
from detjax.server.service import Service

LOG = logging.getLogger("detjax.server")

_MOST_NAMES = 8
"""Adapters that the message about an unknown model lists."""

LARGE_BODY = 2**18
"""Bytes of a body beyond which no two are parsed without a look at others between."""

_TAIL = 16
"""Tokens at the end of a prompt in which the model may be told to think."""

MAX_LISTED = 2**20
"""Entries of the lists of a request's sampling, over its prompts: each prompt is checked alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnginePrompt:
    """One prompt of a request, ready for the engine, and its text if an answer begins with it."""

    token_ids: tuple[int, ...]
    echo: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRequest:
    """A request, ready for the engine."""

    engine_prompts: Sequence[EnginePrompt]
    shape: Shape
    fields: SamplingFields

    @property
    def has_usage(self) -> bool:
        """Whether a stream ends with a count of tokens."""
        options = self.fields.stream_options
        return options is not None and options.include_usage

    @property
    def counts_in_each(self) -> bool:
        """Whether each event of a stream counts the tokens so far."""
        options = self.fields.stream_options
        return options is not None and options.continuous_usage_stats

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts."""
        return sum(len(prompt.token_ids) for prompt in self.engine_prompts)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedRequest:
    """A request that was parsed, and how the rest of it is read: its text becomes tokens."""

    fields: SamplingFields
    run: Callable[[], Awaitable[PreparedRequest]]


class RequestReader:
    """Reads requests for one service."""

    def __init__(self, service: Service):
        """For this one."""
        self._service = service
        self._parsing = asyncio.Lock()
        self._has_warned = False

    async def fields[T: msgspec.Struct](self, request: Request, kind: type[T]) -> T:
        """What a request says in its query, or else in its body."""
        body, query = await self.body(request), request.query_params
        if not query:
            return parse(body or b"{}", kind)
        if body.strip() not in (b"", b"{}"):
            raise RefusedError("give fields in the query or in the body, not in both")
        return read_query(query, kind)

    async def body(self, request: Request) -> bytes:
        """The body, no larger and no later than allowed."""
        limits, body = self._service.limits, bytearray()
        coding = request.headers.get("content-encoding", "").strip()
        if coding.lower() not in ("", "identity"):
            raise RefusedError(
                f"Content-Encoding: {coding[:80]} is not supported; send the body as it is",
                status=415,
                code="unsupported_encoding",
                field="Content-Encoding",
            )
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

    async def parsed[T: msgspec.Struct](self, request: Request, kind: type[T]) -> T:
        """The body, read as one of some kind.

        Raises:
            RefusedError: As `body` and `parse` do.
        """
        body = await self.body(request)
        if len(body) <= LARGE_BODY:
            return parse(body, kind)
        # WHY: of forty large bodies that come at once, each takes its tens of ms by itself.
        async with self._parsing:
            await asyncio.sleep(0)
            return parse(body, kind)

    def check_model(self, name: str | None) -> ServedAdapter | None:
        """Return the adapter of this name; None for the model itself, or no name.

        Raises:
            RefusedError: If neither the model nor an adapter has this name.
        """
        model = self._service.model
        served = model.name
        if name not in (None, served):
            adapter = None if model.adapters is None else model.adapters.get(name)
            if adapter is not None:
                return adapter
            adapters = [] if model.adapters is None else [one.name for one in model.adapters]
            some = [*map(repr, [served, *adapters[:_MOST_NAMES]])]
            if more := len(adapters[_MOST_NAMES:]):
                some.append(f"{more} more adapters, which GET /v1/models lists,")
            raise RefusedError(
                f"model {name!r:.200} is not served here; {' and '.join(some)} "
                f"{'are' if adapters else 'is'}",
                status=404,
                code="model_not_found",
                field="model",
            )
        return None

    def completion(self, asked: CompletionRequest, request_id: str) -> ParsedRequest:
        """A request of /v1/completions."""
        return ParsedRequest(fields=asked, run=lambda: self._completion(asked, request_id))

    async def _completion(self, asked: CompletionRequest, request_id: str) -> PreparedRequest:
        adapter = self.check_model(asked.model)
        asked.check()
        prompts = asked.prompts(self._service.model.max_len)
        shape = self._shape(
            asked,
            max_tokens=asked.max_tokens,
            num_top=asked.logprobs,
            num_scored=asked.num_scored(),
            is_chat=False,
            request_id=request_id,
            adapter=adapter,
        )
        self._check_work(len(prompts), shape)
        shape = dataclasses.replace(shape, warnings=self._warnings(prompts, asked))
        engine_prompts = await self._engine_prompts(prompts, asked)
        return PreparedRequest(engine_prompts=engine_prompts, shape=shape, fields=asked)

    def _warnings(
        self, prompts: Sequence[str | TokenIds], asked: CompletionRequest
    ) -> tuple[str, ...]:
        """What answers say of prompts that look like rendered templates; the first is logged."""
        if not asked.add_special_tokens:
            return ()
        left, found = LOOKED_AT, ""  # of all prompts: this runs where every stream runs
        for text in prompts:
            if isinstance(text, str) and left > 0 and not found:
                found = self._service.model.tokenizer.control_in(text[:left])
                left -= len(text)
        if not found:
            return ()
        warning = (
            f"the control token {found!r} in the prompt is text to the model, as in all prompts; "
            "if the prompt is a rendered chat template, send add_special_tokens=false"
        )
        if not self._has_warned:
            self._has_warned = True
            LOG.warning("%s (said once, and in each such answer)", warning)
        return (warning,)

    async def _engine_prompts(
        self, prompts: Sequence[str | TokenIds], asked: CompletionRequest
    ) -> list[EnginePrompt]:
        """The prompts as tokens, checked; those that are texts are read together."""
        places = [f"prompt[{i}]" if len(prompts) > 1 else "" for i in range(len(prompts))]
        taken = {
            i: self._taken(prompt, asked, places[i])
            for i, prompt in enumerate(prompts)
            if not isinstance(prompt, str)
        }
        texts = {i: prompt for i, prompt in enumerate(prompts) if isinstance(prompt, str)}
        encoded = await self.encode(list(texts.values()), is_raw=not asked.add_special_tokens)
        for i, ids in zip(texts, encoded, strict=True):
            taken[i] = self._taken(ids, asked, places[i])
        all_ids = [taken[i] for i in range(len(prompts))]
        if not asked.echo:
            return [EnginePrompt(token_ids=ids) for ids in all_ids]
        is_whole = asked.truncate_prompt_tokens is None
        echoes: list[str | None] = [
            prompt if isinstance(prompt, str) and is_whole else None for prompt in prompts
        ]
        unread = [ids for ids, echo in zip(all_ids, echoes, strict=True) if echo is None]
        decoded = iter(await self._service.texts.decode(unread))
        return [
            EnginePrompt(token_ids=ids, echo=next(decoded) if echo is None else echo)
            for ids, echo in zip(all_ids, echoes, strict=True)
        ]

    def _taken(self, ids: Sequence[int], asked: CompletionRequest, place: str) -> tuple[int, ...]:
        """What is taken of a prompt, checked; `place` names one of several."""
        kept = self._kept(tuple(ids), asked, asked.max_tokens)
        self._service.check_prompt(kept, asked.max_tokens, place=place)
        return kept

    def _kept(
        self, ids: tuple[int, ...], asked: SamplingFields, max_tokens: int
    ) -> tuple[int, ...]:
        """A prompt as `truncate_prompt_tokens` wants it."""
        most, max_len = asked.truncate_prompt_tokens, self._service.model.max_len
        try:
            return last_tokens(ids, most, max_tokens=max_tokens, max_len=max_len)
        except ValueError as error:
            raise RefusedError(str(error), field="truncate_prompt_tokens") from error

    def _check_work(self, num_prompts: int, shape: Shape) -> None:
        """Refuse what the queue has no room for, or what lists too much for each prompt.

        WHY: before any prompt is read, as a thousand prompts of a thousand sequences are a request
        of 5 kB.
        """
        sampling = shape.sampling
        num_listed = num_prompts * sum(
            map(len, (sampling.allowed_token_ids, sampling.stop_token_ids, sampling.logit_bias))
        )
        if num_listed > MAX_LISTED:
            raise RefusedError(
                f"{num_prompts} prompts with these allowed_token_ids, stop_token_ids and "
                f"logit_bias have {num_listed} entries, more than {MAX_LISTED}; send fewer prompts "
                "at once",
                field="prompt",
            )
        self._service.check_queue(num_prompts, sampling, is_deterministic=shape.is_deterministic)

    def chat(self, asked: ChatRequest, request_id: str) -> ParsedRequest:
        """A request of /v1/chat/completions."""
        return ParsedRequest(fields=asked, run=lambda: self._chat(asked, request_id))

    async def _chat(self, asked: ChatRequest, request_id: str) -> PreparedRequest:
        adapter = self.check_model(asked.model)
        asked.check()
        num_top = (asked.top_logprobs or 0) if asked.logprobs else None

        def shape_of(max_tokens: int) -> Shape:
            return self._shape(
                asked, max_tokens=max_tokens, num_top=num_top, num_scored=asked.prompt_logprobs,
                is_chat=True, request_id=request_id, adapter=adapter,
            )  # fmt: skip

        most = asked.max_tokens or asked.max_completion_tokens
        self._check_work(1, shape_of(most or self._service.model.max_len))
        ids = await self.template(asked.messages, asked.variables())
        ids = self._kept(ids, asked, most or 1)
        try:
            shape = shape_of(self._service.check_prompt(ids, most))
        except RefusedError as error:
            error.field = "messages" if error.field == "prompt" else error.field
            raise
        syntax, sampling = self._syntax_of(asked, ids), shape.sampling
        if syntax is not None and syntax.has_channels:  # which control tokens tell apart
            sampling = dataclasses.replace(sampling, skip_special_tokens=False)
        shape = dataclasses.replace(
            shape, syntax=syntax, sampling=sampling, warnings=_tools_warning(asked)
        )
        return PreparedRequest(
            engine_prompts=[EnginePrompt(token_ids=ids)], shape=shape, fields=asked
        )

    def _syntax_of(self, asked: ChatRequest, prompt_ids: Sequence[int]) -> AnswerSyntax | None:
        """In which syntax the model writes an answer; None where it is text alone."""
        form, outputs = asked.response_format, asked.structured_outputs
        tokenizer, forced = self._service.model.tokenizer, asked.forced_tools()
        # WHY: JSON is an answer from its first character. Other forms may have tags in them.
        if outputs is not None and (outputs.json is not None or outputs.json_object):
            return None
        if form is not None and form.type != "text" and not forced:
            return None
        tools = [] if asked.tool_choice == "none" else forced or asked.tools or []
        has_own = bool(tools) and tokenizer.tool_template is not None
        syntax = AnswerSyntax.of(
            (tokenizer.tool_template if has_own else tokenizer.chat_template) or "",
            tools,
            prompt=tokenizer.decode(prompt_ids[-_TAIL:]),
            is_forced=bool(forced),
            is_single=asked.parallel_tool_calls is False,
        )
        return None if syntax.is_plain else syntax

    def _shape(
        self,
        asked: SamplingFields,
        *,
        max_tokens: int,
        num_top: int | None,
        num_scored: int | None,
        is_chat: bool,
        request_id: str,
        adapter: ServedAdapter | None,
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
            names_ids=asked.return_tokens_as_token_ids,
            has_logprob_bytes=asked.return_logprob_bytes,
            has_receipt=asked.receipt,
            num_prompt_top=asked.prompt_logprobs,
            request_id=request_id,
            adapter=adapter,
        )

    async def encode(self, texts: Sequence[str], *, is_raw: bool = False) -> list[tuple[int, ...]]:
        """The ids of texts; `is_raw`: as they are written, with the special tokens in them."""
        try:
            return await self._service.texts.encode(texts, is_raw=is_raw)
        except RefusedError as error:
            error.field = "prompt"
            raise

    async def template(
        self, messages: Sequence[dict[str, Any]], variables: dict[str, Any]
    ) -> tuple[int, ...]:
        """The ids of a conversation, through the model's template."""
        try:
            return await self._service.texts.template(messages, variables)
        except RefusedError as error:
            error.field = _field_of_chat(str(error), variables)
            raise


def _field_of_chat(message: str, variables: Mapping[str, Any]) -> str:
    """What an error of `Tokenizer.apply_chat_template` is about, as it says at its beginning."""
    found = re.match(r"[\w.[\]]+", message)
    place = found[0] if found else ""
    if place.startswith(("messages[", "tools[")) or place in _OF_CHAT:
        return place
    return f"chat_template_kwargs.{place}" if place in variables else "messages"


_OF_CHAT = (
    "tools", "documents", "reasoning_effort", "add_generation_prompt", "continue_final_message",
)  # fmt: skip


def _tools_warning(asked: ChatRequest) -> tuple[str, ...]:
    """What an answer says of tools that its form leaves no room to call."""
    form = asked.response_format
    has_form = asked.structured_outputs is not None or form is not None and form.type != "text"
    if not (asked.tools and has_form and asked.tool_choice in (None, "auto")):
        return ()
    return (
        "response_format and structured_outputs are the form of the whole answer, so it calls no "
        "tool; send tool_choice='required' for a call, and the form without tools for the answer",
    )
