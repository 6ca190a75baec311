# SPDX-License-Identifier: Apache-2.0
"""What clients may ask about conversations: chat completions, and the tokens of texts."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec

from detjax.engine.sampling.structured_output import StructuredOutput
from detjax.server.answer_reader import call_schema
from detjax.server.errors import RefusedError
from detjax.server.protocol import Name, SamplingFields, TokenIds

Messages = Annotated[list[dict[str, Any]], msgspec.Meta(max_length=16_384)]
Tools = Annotated[list[dict[str, Any]], msgspec.Meta(max_length=1024)]


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A JSON schema as OpenAI has it. `name` and `description` decide nothing.

    Attributes:
        schema: The schema.
        strict: Every answer is of the schema, so false is taken for true.
    """

    name: str
    description: str = ""
    schema: dict[str, Any]
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The form of an answer.

    Attributes:
        type: "text", "json_object" or "json_schema".
        json_schema: With the last.
    """

    type: str = "text"
    json_schema: JsonSchema | None = None

    def form(self) -> StructuredOutput | None:
        """The form; None for text.

        Raises:
            ValueError: If there is no such type, or its schema is missing.
        """
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("response_format has json_schema with that type, and no other")
        if self.json_schema is not None:
            return StructuredOutput.of_schema(self.json_schema.schema)
        if self.type == "json_object":
            return StructuredOutput(kind="json_object")
        if self.type != "text":
            raise ValueError(
                f"response_format of type {self.type!r} is none of text, json_object, json_schema"
            )
        return None


class ChatRequest(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/chat/completions.

    Attributes:
        messages: The conversation; each has a `role`, and what the model's template reads.
        max_tokens, max_completion_tokens: Most tokens of an answer; as many as the context has room
            for if neither is given.
        logprobs: Report the logprob of each token.
        top_logprobs: With `logprobs`, how many of the most likely tokens to report, up to 64.
        tools, documents: Given to the model's template.
        tool_choice: "auto"; "none" keeps the tools from the template; "required" or a function by
            its name makes the answer one call, whatever `response_format` is.
        chat_template_kwargs: Further variables of the template, such as `enable_thinking`.
        add_generation_prompt: Begin the assistant's answer behind the messages; true unless
            `continue_final_message` is.
        continue_final_message: The answer goes on in the last message.
        response_format: The form of the answer, in place of `structured_outputs`.
        reasoning_effort: Given to a template that has this variable, as that of gpt-oss. "none" is
            taken by all: it turns off `enable_thinking` where a template has that.
        add_special_tokens, audio, modalities, prediction, functions, function_call, verbosity,
        web_search_options, echo, include_reasoning: Taken only as `NEUTRAL` has them.
    """

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **SamplingFields.NEUTRAL,
        "add_special_tokens": (False,),
        "audio": (),
        "modalities": (["text"],),
        "prediction": (),
        "functions": ([],),
        "function_call": ("auto", "none"),
        "verbosity": ("medium",),
        "web_search_options": (),
        "echo": (False,),
        "include_reasoning": (True,),
    }

    messages: Messages
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=64)] | None = None
    tools: Tools | None = None
    documents: Messages | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    add_special_tokens: bool | None = None
    audio: dict[str, Any] | None = None
    modalities: list[str] | None = None
    prediction: dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    verbosity: str | None = None
    web_search_options: dict[str, Any] | None = None
    echo: bool | None = None
    include_reasoning: bool | None = None

    def check(self) -> None:
        """Refuse what would have to be ignored."""
        super().check()
        check_tools(self.tools)
        if self.top_logprobs and not self.logprobs:
            raise RefusedError("top_logprobs needs logprobs=true", field="top_logprobs")
        if self.forced_tools() and self.structured_outputs:
            raise RefusedError(
                "tool_choice asks for a call of a tool, which has a form of its own; leave out "
                "structured_outputs",
                field="tool_choice",
            )
        if self.max_tokens not in (None, self.max_completion_tokens or self.max_tokens):
            raise RefusedError(
                f"max_tokens={self.max_tokens} and max_completion_tokens="
                f"{self.max_completion_tokens} say the same; give one, or one number",
                field="max_tokens",
            )

    def forced_tools(self) -> list[dict[str, Any]]:
        """The functions of which the answer must call one; none where it need not."""
        choice, tools = self.tool_choice, self.tools or []
        if choice in (None, "auto", "none"):
            return []
        if choice == "required" and tools:
            return tools
        named = choice.get("function") if isinstance(choice, dict) else None
        if (
            isinstance(named, dict)
            and isinstance(choice, dict)
            and choice.get("type") == "function"
        ):
            if found := [tool for tool in tools if tool["function"]["name"] == named.get("name")]:
                return found[:1]
        names = [tool["function"]["name"] for tool in tools]
        if not names:
            raise RefusedError(
                f"tool_choice={choice!r:.200} needs tools, and there are none", field="tool_choice"
            )
        raise RefusedError(
            f"tool_choice={choice!r:.200} is none of auto, none, required, and a function of "
            f"tools, which are {names!r:.200}",
            field="tool_choice",
        )

    def form(self) -> StructuredOutput | None:
        """The form of the answer; None leaves it free."""
        if forced := self.forced_tools():
            try:
                return StructuredOutput.of_schema(call_schema(forced))
            except ValueError as error:
                raise RefusedError(str(error), field="tools") from error
        if self.response_format is None:
            return super().form()
        if self.structured_outputs is not None:
            raise RefusedError(
                "response_format and structured_outputs say the same; give one",
                field="response_format",
            )
        try:
            return self.response_format.form()
        except ValueError as error:
            raise RefusedError(str(error), field="response_format") from error

    def form_field(self) -> str:
        """Which field says the form."""
        if self.tool_choice not in (None, "auto", "none"):  # tools may not be checked yet
            return "tools"
        return super().form_field() if self.response_format is None else "response_format"

    def names(self) -> dict[str, str]:
        """What this request calls what the library names otherwise."""
        has_other = self.max_completion_tokens is not None and self.max_tokens is None
        return super().names() | ({"max_tokens": "max_completion_tokens"} if has_other else {})

    def variables(self) -> dict[str, Any]:
        """What the template sees beside the messages."""
        has_tools = self.tool_choice != "none"
        return _variables(
            self,
            tools=self.tools if has_tools else None,
            documents=self.documents,
            reasoning_effort=self.reasoning_effort,
        )


def _variables(asked: "ChatRequest | TokenizeRequest", **fields: Any) -> dict[str, Any]:
    """What a template sees beside the messages, each said once."""
    fields["add_generation_prompt"] = asked.add_generation_prompt
    fields["continue_final_message"] = asked.continue_final_message or None
    given = {name: value for name, value in fields.items() if value not in (None, [])}
    more = asked.chat_template_kwargs or {}
    for name in ("messages", *fields):
        if name in more:
            raise RefusedError(
                f"chat_template_kwargs.{name} is a field of its own; give it there",
                field=f"chat_template_kwargs.{name}",
            )
    return more | given


MAX_NAME = 256
"""Characters of a function's name; OpenAI takes 64."""


def check_tools(tools: Sequence[dict[str, Any]] | None) -> None:
    """Refuse tools that are no functions.

    Raises:
        RefusedError: Naming the tool.
    """
    for i, tool in enumerate(tools or ()):
        function = tool.get("function")
        if tool.get("type") != "function":
            raise RefusedError(
                f"tools[{i}].type={tool.get('type')!r:.80} is not supported: 'function' is",
                field=f"tools[{i}].type",
            )
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RefusedError(
                f"tools[{i}].function must be an object with a name", field=f"tools[{i}].function"
            )
        if not isinstance(function.get("parameters"), dict | None):
            raise RefusedError(
                f"tools[{i}].function.parameters={function['parameters']!r:.80} must be a JSON "
                "schema, as an object",
                field=f"tools[{i}].function.parameters",
            )
        if len(function["name"]) > MAX_NAME:
            raise RefusedError(
                f"tools[{i}].function.name has {len(function['name'])} characters, more than "
                f"{MAX_NAME}",
                field=f"tools[{i}].function.name",
            )


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /tokenize: a text or a conversation.

    Attributes:
        model: The served name, or nothing.
        prompt: A text.
        messages: A conversation, for the template.
        add_special_tokens: Put the special tokens that the model expects around the text. Without
            them the text is taken as it is written: special tokens written out in it are these
            tokens, which in a prompt they never are. True if not given; of a conversation, whose
            template has its own, taken only as false.
        return_token_strs: Also what the vocabulary calls each token.
        tools, chat_template_kwargs, add_generation_prompt, continue_final_message: Of a
            conversation, as chat completions have them.
    """

    model: Name | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    def check(self) -> None:
        """Refuse what would have to be ignored."""
        if (self.prompt is None) == (self.messages is None):
            raise RefusedError("give either prompt or messages", field="prompt")
        if self.messages is None:
            for name, value in self.variables().items():
                raise RefusedError(
                    f"{name}={value!r:.200} is of messages, and this is a prompt", field=name
                )
        elif self.add_special_tokens:
            raise RefusedError(
                "add_special_tokens=true is of a prompt; a template has its own tokens",
                field="add_special_tokens",
            )
        check_tools(self.tools)

    def variables(self) -> dict[str, Any]:
        """What the template sees beside the messages."""
        return _variables(self, tools=self.tools)


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /detokenize; `model` may be left out. Special tokens are shown."""

    model: Name | None = None
    tokens: Annotated[TokenIds, msgspec.Meta(max_length=2**20)]
