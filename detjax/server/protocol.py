# SPDX-License-Identifier: Apache-2.0
"""What clients may ask, as typed records. A field that is not here is an error that names it.

Names and meanings are those of OpenAI's API, and of vLLM's server where it adds to it. A field that
OpenAI has and detjax cannot honour is taken only with the value that asks for nothing. `null` means
that an optional field is absent.
"""

import dataclasses
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

import msgspec

from detjax.engine.requests.limits import MAX_LOGIT_BIASES
from detjax.engine.requests.sampling_params import SamplingParams, draw_seed
from detjax.engine.sampling.structured_output import StructuredOutput
from detjax.server.errors import RefusedError

StopStrings = str | list[str]
TokenIds = list[int]
Name = Annotated[str, msgspec.Meta(max_length=1024)]

MAX_PROMPTS = 1024
"""Prompts of one request."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a stream has besides the answer.

    Attributes:
        include_usage: One more chunk at the end, which counts tokens.
        continuous_usage_stats: Each chunk counts the tokens of the request so far.
        include_obfuscation: Taken only as false.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False

    def check(self) -> None:
        """Refuse what would have to be ignored."""
        if self.include_obfuscation:
            raise RefusedError(
                "stream_options.include_obfuscation=true is not supported: nothing is added to "
                "the events; leave it out",
                field="stream_options.include_obfuscation",
            )


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The form of an answer, as vLLM names it: exactly one.

    Attributes:
        json: A JSON schema, as an object or as JSON.
        json_object: Any JSON object.
        regex: A regular expression.
        choice: Texts, of which the answer is one.
        grammar: In llguidance's variant of Lark.
    """

    json: str | dict[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def form(self) -> StructuredOutput:
        """The form.

        Raises:
            ValueError: If there is not exactly one, or it is not valid.
        """
        fields = msgspec.structs.asdict(self)
        given = {name: value for name, value in fields.items() if value not in (None, False)}
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs has {len(given)} of {', '.join(fields)}; give one"
            )
        if self.json is not None:
            return StructuredOutput.of_schema(self.json)
        if self.choice is not None:
            return StructuredOutput.of_choices(self.choice)
        ((kind, spec),) = given.items()
        return StructuredOutput(kind=kind, spec="" if spec is True else spec)


class CommonFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What all requests for an answer have in common.

    Attributes:
        NEUTRAL: Fields that detjax cannot honour, each with the values that ask for nothing. Null
            always does.
        model: The served name; without it the model itself answers.
        user, metadata, safety_identifier, prompt_cache_key, session_id: For the caller's own
            records; they decide nothing.
        parallel_tool_calls: Whether several calls of tools are told; if not, the first alone is.
        store, service_tier, prompt_cache_retention, prompt_cache_options, moderation: Taken only as
            `NEUTRAL` has them.
    """

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "store": (False,),
        "service_tier": ("auto", "default"),
        "prompt_cache_retention": ("in_memory",),
        "prompt_cache_options": ({},),
        "moderation": (),
    }

    model: Name | None = None
    user: str = ""
    metadata: dict[str, str] | None = None
    safety_identifier: str = ""
    prompt_cache_key: str = ""
    session_id: str = ""
    store: bool | None = None
    parallel_tool_calls: bool | None = None
    service_tier: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    moderation: dict[str, Any] | None = None

    def check(self) -> None:
        """Refuse what would have to be ignored."""
        for name, values in self.NEUTRAL.items():
            value = getattr(self, name)
            if value is not None and value not in values:
                said, *taken = (msgspec.json.encode(v).decode() for v in (value, None, *values))
                raise RefusedError(
                    f"{name}={said:.200} is not supported, only {' and '.join(taken)}; leave it "
                    "out",
                    field=name,
                )


class SamplingFields(CommonFields, forbid_unknown_fields=True, kw_only=True):
    """What completions and chat completions have in common.

    Attributes:
        temperature, top_p, top_k, min_p, n, seed: As `SamplingParams` has them. Defaults are
            those of the model's generation_config.json, else OpenAI's; where no seed is given, or
            -1 as vLLM has it, one is drawn, and is in the answer's `sampling`.
        stop: Up to 16 texts that end the answer.
        stop_token_ids: Tokens that do.
        include_stop_str_in_output, ignore_eos, min_tokens, allowed_token_ids, bad_words,
        repetition_penalty, presence_penalty, frequency_penalty, logprobs_mode, noise,
        skip_special_tokens, spaces_between_special_tokens, truncate_prompt_tokens: As
            `SamplingParams` has them.
        logit_bias: A number for each of some token ids, which are texts in JSON.
        structured_outputs: The form of the answer.
        stream: Send each piece as it is made (server-sent events).
        stream_options: Only with `stream`.
        is_deterministic: Whether the answer must be the canonical one; null is what the server's
            mode can promise.
        priority: Higher goes first, from -100 to 100.
        cache_salt: Prefixes are shared among requests of one salt alone.
        return_token_ids: Put `prompt_token_ids` and `token_ids` into the answer.
        return_tokens_as_token_ids: Name each token of `logprobs` by its id, as "token_id:17": no
            two have one name.
        return_logprob_bytes: Put the exact float32 logprobs into the answer, as base64 of
            little-endian bytes; those of the prompt too, where they are reported.
        receipt: Put a receipt into each choice: one line, as `detjax.audit` reads it.
        prompt_logprobs: Report the logprob and rank of each token of the prompt, with so many of
            the most likely ones, up to 64.
        use_beam_search, length_penalty: Of vLLM, taken only as `NEUTRAL` has them.
    """

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **CommonFields.NEUTRAL,
        "use_beam_search": (False,),
        "length_penalty": (1.0,),
    }

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int = 1
    seed: int | None = None
    stop: StopStrings | None = None
    stop_token_ids: TokenIds = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    is_deterministic: bool | None = None
    priority: int = 0
    cache_salt: Name = ""
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    return_logprob_bytes: bool = False
    receipt: bool = False
    prompt_logprobs: Annotated[int, msgspec.Meta(ge=0, le=64)] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    allowed_token_ids: TokenIds | None = None
    bad_words: list[str] = []
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] | None = None
    logprobs_mode: Name = "raw"
    noise: Name = "per_prompt"
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputs | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None

    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stops) > 16:
            raise RefusedError(f"stop has {len(stops)} texts, more than 16", field="stop")
        return stops

    def biases(self) -> dict[int, float]:
        """The bias of each token id."""
        if len(self.logit_bias or {}) > MAX_LOGIT_BIASES:
            raise RefusedError(
                f"logit_bias has {len(self.logit_bias or {})} entries, more than "
                f"{MAX_LOGIT_BIASES}",
                field="logit_bias",
            )
        biases = {}
        for key, bias in (self.logit_bias or {}).items():
            if not key.isascii() or not key.isdigit():
                raise RefusedError(f"logit_bias of {key!r}: give a token id", field="logit_bias")
            biases[int(key)] = bias
        return biases

    def form(self) -> StructuredOutput | None:
        """The form of the answer; None leaves it free."""
        if self.structured_outputs is None:
            return None
        try:
            return self.structured_outputs.form()
        except ValueError as error:
            raise RefusedError(str(error), field="structured_outputs") from error

    def form_field(self) -> str:
        """Which field says the form."""
        return "structured_outputs"

    def names(self) -> dict[str, str]:
        """What this request calls what the library names otherwise."""
        return {"structured_output": self.form_field(), "bad_words_token_ids": "bad_words"}

    def as_asked(self, error: RefusedError) -> RefusedError:
        """An error of the library in the words of this request, with the field that it is about.

        Where the error has none it is the first field of the sampling that the message names.
        """
        names = self.names()
        words = re.compile(rf"\b({'|'.join(names)})(?=[=\[,]|$)")
        message = words.sub(lambda found: names[found[1]], str(error))
        field = self.form_field() if error.field == "structured_outputs" else error.field
        if not field and error.status == 400:
            field = next((word for word in re.findall(r"\w+", message) if word in _SAMPLED), "")
        return RefusedError(message, status=error.status, code=error.code, field=field)

    def num_candidates(self) -> int:
        """Answers that are made, of which the best are given; 0 is those that are given."""
        return 0

    def check(self) -> None:
        """Refuse what would have to be ignored."""
        super().check()
        if self.truncate_prompt_tokens == 0 or (self.truncate_prompt_tokens or 0) < -1:
            raise RefusedError(
                f"truncate_prompt_tokens={self.truncate_prompt_tokens} must be -1 or at least 1",
                field="truncate_prompt_tokens",
            )
        if self.allowed_token_ids == []:
            raise RefusedError(
                "allowed_token_ids is empty, which leaves no token; leave it out to allow all",
                field="allowed_token_ids",
            )
        if self.stream_options is not None and not self.stream:
            raise RefusedError("stream_options needs stream=true", field="stream_options")
        if self.stream_options is not None:
            self.stream_options.check()


class CompletionRequest(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/completions.

    Attributes:
        prompt: A text, a list of token ids, or a list of either.
        max_tokens: Most tokens of an answer. With `echo` or `prompt_logprobs` it may be 0.
        logprobs: How many of the most likely tokens to report at each position, up to 64.
        add_special_tokens: Put the special tokens that the model expects around a text. Without
            them it is taken as it is written: special tokens written out in it are these tokens,
            as a rendered chat template means them, which else they never are.
        echo: Begin the text with the prompt; with `logprobs`, which then has the prompt's tokens
            too, with the text that its tokens have.
        best_of: Answers that are made, of which the `n` with the greatest sum of logprobs are
            given, best first. Not with `stream`.
        suffix: Taken only as null.
    """

    prompt: str | list[str | int | TokenIds]
    max_tokens: Annotated[int, msgspec.Meta(ge=0)] = 16
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=64)] | None = None
    add_special_tokens: bool = True
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None

    def num_candidates(self) -> int:
        """Answers that are made, of which the best are given; 0 is those that are given."""
        return self.best_of or 0

    def prompts(self, max_len: int) -> list[str | TokenIds]:
        """The prompts, one an entry, before any of them is read.

        Raises:
            RefusedError: If there are none, more than `MAX_PROMPTS`, texts beside token ids, or one
                of far more token ids than `max_len`.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        count, is_ids = len(self.prompt), bool(self.prompt) and isinstance(self.prompt[0], int)
        is_cut = is_ids and self.truncate_prompt_tokens is not None
        if count > max(MAX_PROMPTS, max_len if is_ids else 0) and not is_cut:
            most = f"tokens, more than {max_len}" if is_ids else f"prompts, more than {MAX_PROMPTS}"
            code = "context_length_exceeded" if is_ids else ""
            raise RefusedError(f"prompt has {count} {most}", code=code, field="prompt")
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
        if self.stream and self.best_of not in (None, self.n):
            raise RefusedError(
                f"best_of={self.best_of} does not go with stream=true: the best are known when all "
                "have ended",
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


_SAMPLED = {field.name for field in dataclasses.fields(SamplingParams)} | {"priority"}
NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})
_OPENAI = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def sampling_params(
    fields: SamplingFields,
    *,
    max_tokens: int,
    num_top: int,
    num_scored: int | None = None,
    defaults: Mapping[str, Any] = NO_DEFAULTS,
) -> SamplingParams:
    """The sampling of a request; what it leaves out is that of `defaults`, else OpenAI's.

    Its prompts are truncated where they are read, so it says nothing of that.

    Raises:
        RefusedError: If a value is out of range; the message names it.
    """
    chosen = {
        name: defaults.get(name, other) if (asked := getattr(fields, name)) is None else asked
        for name, other in _OPENAI.items()
    }
    if chosen["top_k"] == -1:
        chosen["top_k"] = 0
    try:
        sampling = SamplingParams(
            **chosen,
            max_tokens=max_tokens,
            seed=None if fields.seed == -1 else fields.seed,
            n=fields.n,
            stop=fields.stops(),
            stop_token_ids=tuple(fields.stop_token_ids),
            logprobs=num_top,
            best_of=fields.num_candidates(),
            logit_bias=tuple(fields.biases().items()),
            allowed_token_ids=tuple(fields.allowed_token_ids or ()),
            bad_words=tuple(fields.bad_words),
            ignore_eos=fields.ignore_eos,
            min_tokens=fields.min_tokens,
            presence_penalty=fields.presence_penalty,
            frequency_penalty=fields.frequency_penalty,
            logprobs_mode=fields.logprobs_mode,
            noise=fields.noise,
            include_stop_str_in_output=fields.include_stop_str_in_output,
            skip_special_tokens=fields.skip_special_tokens,
            spaces_between_special_tokens=fields.spaces_between_special_tokens,
            structured_output=fields.form(),
            prompt_logprobs=num_scored,
        )
        return sampling.seeded(draw_seed())
    except ValueError as error:
        if isinstance(error, RefusedError):
            raise
        raise fields.as_asked(RefusedError(str(error))) from error
