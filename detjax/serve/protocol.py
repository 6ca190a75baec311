# SPDX-License-Identifier: Apache-2.0
"""What clients may ask, as typed records. A field that is not here is an error that names it.

Names and meanings are those of OpenAI's API, and of vLLM's server where it adds to it. A field that
OpenAI has and detjax cannot honour is taken only with the value that asks for nothing.
"""

from typing import Annotated, Any

import msgspec

from detjax.serving.request import SamplingParams


class RefusedError(ValueError):
    """A request that cannot be answered as it was asked: status, OpenAI's code, and the field."""

    def __init__(self, message: str, *, status: int = 400, code: str = "", field: str = ""):
        super().__init__(message)
        self.status, self.code, self.field = status, code, field


Texts = str | list[str]
TokenIds = list[int]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a stream has besides the answer.

    Attributes:
        include_usage: One more chunk at the end, which counts tokens.
    """

    include_usage: bool = False


class SamplingFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What completions and chat completions have in common.

    Attributes:
        model: The served name.
        temperature, top_p, top_k, min_p, n, seed: As `SamplingParams` has them. OpenAI's defaults;
            the seed is 0 where none is given, so that the same request has the same answer.
        stop: Up to 16 texts that end the answer.
        stop_token_ids: Tokens that do.
        stream: Send each piece as it is made (server-sent events).
        stream_options: Only with `stream`.
        is_deterministic: Whether the answer must be the canonical one; null is what the server's
            mode can promise.
        priority: Higher goes first, from -100 to 100.
        cache_salt: Prefixes are shared among requests of one salt alone.
        return_token_ids: Put `prompt_token_ids` and `token_ids` into the answer.
        return_logprob_bytes: Put the exact float32 logprobs into the answer, as base64 of
            little-endian bytes; those of the prompt too, where they are reported.
        prompt_logprobs: Report the logprob and rank of each token of the prompt, with so many of
            the most likely ones, up to 64.
        user, metadata: For the caller's own records; they decide nothing.
        presence_penalty, frequency_penalty, logit_bias: Taken only as 0 and empty.
    """

    model: str
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    n: int = 1
    seed: int | None = None
    stop: Texts | None = None
    stop_token_ids: TokenIds = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    is_deterministic: bool | None = None
    priority: int = 0
    cache_salt: str = ""
    return_token_ids: bool = False
    return_logprob_bytes: bool = False
    prompt_logprobs: Annotated[int, msgspec.Meta(ge=0, le=64)] | None = None
    user: str = ""
    metadata: dict[str, str] | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] | None = None

    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stops) > 16:
            raise RefusedError(f"stop has {len(stops)} texts, more than 16", field="stop")
        return stops

    def check(self) -> None:
        """Refuse what would have to be ignored."""
        for name in ("presence_penalty", "frequency_penalty"):
            if value := getattr(self, name):
                raise RefusedError(f"{name}={value} is not supported: only 0 is", field=name)
        if self.logit_bias:
            raise RefusedError("logit_bias is not supported: leave it empty", field="logit_bias")
        if self.stream_options is not None and not self.stream:
            raise RefusedError("stream_options needs stream=true", field="stream_options")


class CompletionRequest(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/completions.

    Attributes:
        prompt: A text, a list of token ids, or a list of either.
        max_tokens: Most tokens of an answer. With `echo` or `prompt_logprobs` it may be 0.
        logprobs: How many of the most likely tokens to report at each position, up to 64.
        echo: Begin the text with the prompt; with `logprobs`, which then has the prompt's tokens
            too, with the text that its tokens have.
        best_of: Taken only as `n`.
        suffix: Taken only as null.
    """

    prompt: str | list[str | int | TokenIds]
    max_tokens: Annotated[int, msgspec.Meta(ge=0)] = 16
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=64)] | None = None
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None

    def prompts(self) -> list[str | TokenIds]:
        """The prompts, one an entry."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        kinds = set(map(type, self.prompt))
        if kinds == {int}:
            return [[token for token in self.prompt if isinstance(token, int)]]
        if not kinds or int in kinds:
            what = "mixes token ids with other prompts" if kinds else "is an empty list"
            raise RefusedError(f"prompt {what}; give texts or lists of token ids", field="prompt")
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]

    def check(self) -> None:
        """Refuse what would have to be ignored."""
        super().check()
        if self.best_of not in (None, self.n):
            raise RefusedError(
                f"best_of={self.best_of} is not supported where it is not n={self.n}",
                field="best_of",
            )
        if self.suffix:
            raise RefusedError("suffix is not supported: leave it out", field="suffix")
        if not (self.max_tokens or self.echo or self.prompt_logprobs is not None):
            raise RefusedError(
                "max_tokens=0 asks for nothing without echo=true or prompt_logprobs",
                field="max_tokens",
            )

    def num_scored(self) -> int | None:
        """Most likely tokens that are wanted of the prompt; None where no logprobs are."""
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        asked = [count for count in wanted if count is not None]
        return max(asked, default=None if self.max_tokens else 0)


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The form of an answer.

    Attributes:
        type: Taken only as "text".
        json_schema: Taken only as null.
    """

    type: str = "text"
    json_schema: dict[str, Any] | None = None


class ChatRequest(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/chat/completions.

    Attributes:
        messages: The conversation; each has a `role`, and what the model's template reads.
        max_tokens, max_completion_tokens: Most tokens of an answer; as many as the context has room
            for if neither is given.
        logprobs: Report the logprob of each token.
        top_logprobs: With `logprobs`, how many of the most likely tokens to report, up to 64.
        tools, documents: Given to the model's template. What the model answers is left as text.
        tool_choice: Taken only as "auto" and "none"; "none" keeps the tools from the template.
        chat_template_kwargs: Further variables of the template, such as `enable_thinking`.
        response_format: Taken only as text.
    """

    messages: list[dict[str, Any]]
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=64)] | None = None
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None

    def check(self) -> None:
        """Refuse what would have to be ignored."""
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise RefusedError("top_logprobs needs logprobs=true", field="top_logprobs")
        if self.tool_choice not in (None, "auto", "none"):
            raise RefusedError(
                f"tool_choice={self.tool_choice!r} is not supported: 'auto' and 'none' are",
                field="tool_choice",
            )
        if self.response_format is not None and self.response_format.type != "text":
            raise RefusedError(
                f"response_format of type {self.response_format.type!r} is not supported: only "
                "'text' is",
                field="response_format",
            )
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise RefusedError(
                "max_tokens and max_completion_tokens say the same; give one", field="max_tokens"
            )

    def variables(self) -> dict[str, Any]:
        """What the template sees beside the messages."""
        given = dict(self.chat_template_kwargs or {})
        if self.tools and self.tool_choice != "none":
            given["tools"] = self.tools
        if self.documents:
            given["documents"] = self.documents
        return given


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /tokenize: a text or a conversation.

    Attributes:
        model: The served name.
        prompt: A text.
        messages: A conversation, for the template.
        return_token_strs: Also the text of each token.
    """

    model: str
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /detokenize."""

    model: str
    tokens: TokenIds


def parse[T: msgspec.Struct](body: bytes, kind: type[T]) -> T:
    """Read a body.

    Raises:
        RefusedError: If it is no JSON, has a field that is not known, or one of another type.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        message = str(error)
        field = message.rpartition("`$.")[2].partition("`")[0].partition("[")[0]
        if "unknown field" in message:
            field = message.partition("unknown field `")[2].partition("`")[0]
            message = f"unknown field {field!r}: detjax would have to ignore it; leave it out"
        raise RefusedError(message, field=field) from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise RefusedError(f"the body is not JSON: {error}") from error


def sampling_params(
    fields: SamplingFields, *, max_tokens: int, num_top: int, num_scored: int | None = None
) -> SamplingParams:
    """The sampling of a request.

    Raises:
        RefusedError: If a value is out of range; the message names it.
    """
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=fields.temperature,
            top_k=max(0, fields.top_k) if fields.top_k == -1 else fields.top_k,
            top_p=fields.top_p,
            min_p=fields.min_p,
            seed=fields.seed or 0,
            n=fields.n,
            stop=fields.stops(),
            stop_token_ids=tuple(fields.stop_token_ids),
            num_top_logprobs=num_top,
            num_prompt_logprobs=num_scored,
        )
    except ValueError as error:
        if isinstance(error, RefusedError):
            raise
        field = str(error).partition("=")[0]
        raise RefusedError(str(error), field=field if field.isidentifier() else "") from error
