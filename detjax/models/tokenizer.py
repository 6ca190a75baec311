# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back, from the tokenizer files of a Hugging Face folder.

A token's bytes are known one token at a time, so text can be released while it is generated and
is still the text that decoding everything at once gives: both are the same concatenation of
bytes, read as UTF-8.
"""

import contextlib
import dataclasses
import functools
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
import tokenizers.models
import tokenizers.processors

from detjax.models.chat_messages import habits_of, marked, messages_of, tools_of
from detjax.models.chat_template import NO_VARIABLES, OWN, UNKNOWN, Rendered, render_template
from detjax.models.tokenizer_files import (
    CONFIG_FILE,
    JSON_TEMPLATE_FILE,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    ByteRules,
    byte_rules_of,
    check_added_tokens,
    file_states,
    files_sha256,
    read_config,
    read_template_file,
    read_templates,
    set_post_processor,
    take_backend,
    template_tokens,
    templates_sha256,
    token_id_of,
    token_text,
    token_texts,
    unk_id_of,
)

LOOKED_AT = 2**14
"""Characters of a text in which a rendered template has shown a control token."""

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_OTHER_TOKENS = ("sep_token", "cls_token", "mask_token")
"""Tokens that templates may print. Nothing else needs one, so a vocabulary may lack it."""

_TOKEN_LISTS = (
    "additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens",
)  # fmt: skip
"""Keys of a list of tokens, or of an object of tokens that a template sees by their names."""

_ALWAYS_TOLD = ("tools", "documents")
"""Variables that every template sees: null unless given, as in transformers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokenizer:
    """The tokenizer of one model.

    Attributes:
        source: The folder it was read from, for messages.
        backend: The tokenizer.json, without its padding and truncation.
        rules: How its tokens become bytes.
        bos_id: The token that begins a text, where the model has one.
        eos_id: The token that ends one, where the model has one.
        special_ids: Tokens that are never shown: begin, end and the like.
        written: Bytes of added tokens, which are stored as they are shown and not by `rules`.
        control: Finds the texts of these in a text.
        unk_id: What stands for a text that no token has, where the model has one.
        chat_template: A Jinja template, where the model has one.
        tool_template: Another for conversations with tools, where the model has one.
        template_names: Of all templates of the folder, for messages.
        template_tokens: What the template sees beside the messages: `bos_token` and the like.
        files_sha256: Of the files that it was read from: see `tokenizer_files.files_sha256`.
        templates_sha256: Of the chat template; of all by their names, where there are several; None
            where there is none.
    """

    source: Path
    backend: tokenizers.Tokenizer = field(repr=False)
    rules: ByteRules
    bos_id: int | None
    eos_id: int | None
    special_ids: frozenset[int]
    written: Mapping[int, bytes] = field(repr=False)
    control: re.Pattern[str] = field(repr=False)
    unk_id: int | None
    chat_template: str | None
    template_tokens: Mapping[str, Any]
    tool_template: str | None = None
    template_names: tuple[str, ...] = ()
    files_sha256: str
    templates_sha256: str | None = None

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Read tokenizer.json, tokenizer_config.json and the chat templates of `folder`.

        Raises:
            ValueError: If a file is missing or broken, asks for a decoder that is not known, or
                changes meanwhile.
        """
        folder = Path(folder)
        before = file_states(folder)
        backend = take_backend(folder / TOKENIZER_FILE)
        config = read_config(folder)
        sha256 = files_sha256(folder)
        if file_states(folder) != before:
            raise ValueError(
                f"{folder}: a file of the tokenizer was changed while it was read; open the model "
                "when the folder is complete"
            )
        try:
            return cls._from_files(folder, backend, config, sha256)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{folder / CONFIG_FILE} is malformed ({error!r:.200}); copy the file again"
            ) from error

    @classmethod
    def _from_files(
        cls, folder: Path, backend: tokenizers.Tokenizer, config: Mapping[str, Any], sha256: str
    ) -> "Tokenizer":
        added = {
            i: token.content for i, token in backend.get_added_tokens_decoder().items()
        }  # both kinds: an added token need not be special
        check_added_tokens(config, added, folder)
        named = {key: token_text(config[key]) for key in _NAMED_TOKENS if config.get(key)}
        others = {key: token_text(config[key]) for key in _OTHER_TOKENS if config.get(key)}
        lists = [config[key] for key in _TOKEN_LISTS if config.get(key)]
        shown = [text for tokens in lists for text in token_texts(tokens)]
        ids = {text: token_id_of(backend, text, folder) for text in [*named.values(), *shown]}
        found = {text: backend.token_to_id(text) for text in others.values()}
        ids |= {text: token_id for text, token_id in found.items() if token_id is not None}
        special = {
            i for i, token in backend.get_added_tokens_decoder().items() if token.special
        }  # as the tokenizer marks them
        special |= set(ids.values())
        set_post_processor(backend, config, folder, named=named, ids=ids)
        templates = read_templates(folder, config)
        rules = byte_rules_of(backend, folder / TOKENIZER_FILE)
        return cls(
            source=folder,
            backend=backend,
            rules=rules,
            written={
                i: text.encode()
                for i, text in added.items()
                if rules.is_byte_level and backend.model.token_to_id(text) is None
            },
            bos_id=ids.get(named.get("bos_token", "")),
            eos_id=ids.get(named.get("eos_token", "")),
            special_ids=frozenset(special),
            control=_control_pattern(added[i] for i in special if i in added),
            unk_id=unk_id_of(backend),
            chat_template=templates.get("default"),
            template_tokens=template_tokens({**named, **others}, config, _TOKEN_LISTS),
            tool_template=templates.get("tool_use"),
            template_names=tuple(templates),
            files_sha256=sha256,
            templates_sha256=templates_sha256(templates),
        )

    def with_template(self, path: str | Path) -> "Tokenizer":
        """Return this tokenizer with the chat template of a file, for every conversation.

        Raises:
            ValueError: If it cannot be read, or is no template.
        """
        template = read_template_file(Path(path))
        return dataclasses.replace(
            self, chat_template=template, tool_template=None, template_names=("default",),
            templates_sha256=templates_sha256({"default": template}),
        )  # fmt: skip

    def encode(self, text: str, *, has_control: bool = False) -> list[int]:
        """Return the ids of `text`, with the special tokens that the model expects around it.

        Args:
            text: Any.
            has_control: Special tokens written out in the text become that token, as in
                transformers. Without it they are text like any other, so that who writes a prompt
                cannot end a turn or begin one.
        """
        if has_control:
            _check_unicode(text)
            return self.backend.encode(text).ids
        return self._encode(text, (), add_special_tokens=True)

    def make_ready(self) -> None:
        """Make what the first text with a control token in it would wait for, half a second."""
        with contextlib.suppress(ValueError):  # told to whoever has such a text
            _named_backend(self.backend, self.special_ids)

    def control_in(self, text: str) -> str:
        """Return the first special token written out in the beginning of `text`, or "".

        `encode` takes it for text, which is another prompt than a rendered chat template means.
        """
        found = self.control.search(text, 0, LOOKED_AT)
        return found[0] if found else ""

    def encode_raw(self, text: str) -> list[int]:
        """Return the ids of `text` as it is written: nothing is put around it.

        Special tokens written out in it become that token. For texts that a template has made.
        """
        _check_unicode(text)
        return self.backend.encode(text, add_special_tokens=False).ids

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        variables: Mapping[str, Any] = NO_VARIABLES,
        has_control: bool = False,
    ) -> list[int]:
        """Return the ids of a conversation, up to where the assistant begins its answer.

        Args:
            messages: As OpenAI's API or transformers have them: each has a `role` and, as a rule, a
                `content`, which is text or a list of parts of text.
            variables: What else this template knows: `{"enable_thinking": False}`, `tools`. Two are
                known to every template: `add_generation_prompt`, which is true unless given, and
                `continue_final_message`: if true, the answer goes on in the last message.
            has_control: Special tokens written out in messages and variables become that token, as
                in transformers. Without it only those of the template do.

        Raises:
            ValueError: If the model has no chat template, or its template refuses the messages,
                does not read a variable, or takes too long or too much memory. What is wrong with
                a message begins with its place: `messages[2].content`.
        """
        rendered = self._rendered(self._chat(messages, variables))
        if has_control:
            return self.encode_raw(rendered.text)
        return self._encode(rendered.text, self._control_spans(rendered), add_special_tokens=False)

    def _control_spans(self, rendered: Rendered) -> tuple[tuple[int, int], ...]:
        """Where control tokens are that the template wrote.

        Raises:
            ValueError: If it does not show who wrote one.
        """
        spans = []
        for run in _NOT_TOLD.finditer(rendered.origin):
            for found in self.control.finditer(rendered.text, *run.span()):
                if UNKNOWN in rendered.origin[slice(*found.span())]:
                    raise ValueError(
                        f"the chat template of {self.source} changes a text with the control token "
                        f"{found[0]!r} so that it does not show whose it is; take it out of the "
                        "messages and tools, or ask for control tokens in them (has_control)"
                    )
                spans.append(found.span())
        return tuple(spans)

    def _encode(
        self, text: str, spans: tuple[tuple[int, int], ...], *, add_special_tokens: bool
    ) -> list[int]:
        """The ids of a text whose special tokens are at `spans`, and nowhere else.

        Raises:
            ValueError: If others come out of it.
        """
        _check_unicode(text)
        wanted = [self.backend.token_to_id(text[begin:end]) for begin, end in spans]
        if tuple(found.span() for found in self.control.finditer(text)) == spans:
            encoding = self.backend.encode(text, add_special_tokens=add_special_tokens)
            if self._special_of(encoding) == wanted:
                return encoding.ids
        # Under names that no text has, special tokens are split off as the library does, and
        # whatever is between them is one text to it.
        named = _named_backend(self.backend, self.special_ids)
        pieces, at = [], 0
        for begin, end in spans:
            pieces += [text[at:begin], named.names[text[begin:end]]]
            at = end
        encoding = named.backend.encode(
            "".join([*pieces, text[at:]]), add_special_tokens=add_special_tokens
        )
        if self._special_of(encoding) != wanted:
            raise ValueError(
                f"the tokenizer of {self.source} makes control tokens of a text that has none, or "
                "loses some; give token ids"
            )
        return encoding.ids

    def _special_of(self, encoding: tokenizers.Encoding) -> list[int]:
        """The special tokens of a text, without those put around it and those for unknown ones."""
        special = self.special_ids - {self.unk_id}
        pairs = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        return [i for i, is_around in pairs if i in special and not is_around]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> str:
        """Return the text that `apply_chat_template` encodes; arguments and errors are the same.

        A template may print the date (`strftime_now`): then the same messages are another prompt
        on another day. Compare prompt token ids when in doubt.
        """
        return self._rendered(self._chat(messages, variables)).text

    def _chat(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> "_Chat":
        """A conversation as its template reads it."""
        has_tools = variables.get("tools") is not None
        template = (self.tool_template if has_tools else None) or self.chat_template
        if template is None:
            raise ValueError(self._why_no_template())
        given, continues = dict(variables), variables.get("continue_final_message", False)
        given.pop("continue_final_message", None)
        for name in ("continue_final_message", "add_generation_prompt"):
            if not isinstance(variables.get(name, False), bool):
                raise ValueError(f"{name} is {variables[name]!r:.80}; give true or false")
        if continues and given.get("add_generation_prompt"):
            raise ValueError(
                "continue_final_message and add_generation_prompt are both true: an answer goes on "
                "in the last message, or is a message of its own"
            )
        given.setdefault("add_generation_prompt", not continues)
        words = habits_of(template).words
        if given.get("reasoning_effort") == "none" and "reasoning_effort" not in words:
            del given["reasoning_effort"]  # a template that cannot think needs no more
            if "enable_thinking" in words:
                given.setdefault("enable_thinking", False)
        for name, value in given.items():
            # A template without thinking needs no variable to turn it off.
            is_needed = value is continues if name == "add_generation_prompt" else value
            if name == "messages" or name not in words and is_needed:
                raise ValueError(
                    f"{name}: the chat template of {self.source} has no such variable; leave it out"
                )
        given = dict.fromkeys(_ALWAYS_TOLD) | given
        given["tools"] = tools_of(given["tools"])
        told = messages_of(messages, template)
        return _Chat(template=template, messages=told, variables=given, continues=continues)

    def _why_no_template(self) -> str:
        if self.template_names:
            names = ", ".join(map(repr, self.template_names))
            return (
                f"{self.source} has no chat template named 'default', only {names}; write the text "
                "of one to a file and give it with --chat-template (chat_template of LLM)"
            )
        return (
            f"{self.source} has no chat template (no {TEMPLATE_FILE}, no `chat_template` in "
            f"{CONFIG_FILE} or {JSON_TEMPLATE_FILE}): give plain prompts, or use an "
            "instruction-tuned model"
        )

    def _rendered(self, chat: "_Chat") -> Rendered:
        """The text of a conversation, cut behind its last message if that goes on."""
        messages = chat.messages
        if chat.continues:
            last = messages[-1]["content"]
            is_text = isinstance(last, str) and "tool_calls" not in messages[-1]
            if not is_text or _is_found(_CUT, [messages, chat.variables]):
                raise ValueError(
                    f"messages[{len(messages) - 1}].content is {last!r:.80}, in which an "
                    "answer cannot go on; leave out continue_final_message"
                )
            messages = [*messages[:-1], messages[-1] | {"content": last + _CUT}]
        told = {**chat.variables, "messages": messages}
        try:
            rendered = render_template(chat.template, told, self.template_tokens)
        except ValueError as error:
            raise ValueError(
                f"the chat template of {self.source} refuses the messages: {error}"
            ) from error
        if chat.continues and _CUT not in rendered.text:
            raise ValueError(
                f"messages[{len(messages) - 1}].content is changed by the chat template of "
                f"{self.source}, so an answer cannot go on in it; leave out continue_final_message"
            )
        self._check_printed(chat)
        end = rendered.text.rindex(_CUT) if chat.continues else None
        return Rendered(text=rendered.text[:end], origin=rendered.origin[:end])

    def _check_printed(self, chat: "_Chat") -> None:
        """Refuse what the template drops: a message, its calls, or a tool.

        WHY: whether a template prints something depends on all of the conversation, so it renders
        once more with marks. That takes a tenth of what the tokens of the text take.
        """
        with_marks = marked(chat.messages, chat.variables["tools"])
        told = {**chat.variables, "messages": with_marks.messages, "tools": with_marks.tools}
        try:
            text = render_template(chat.template, told, self.template_tokens).text
        except ValueError:
            return  # it reads the marks for something else
        for sign, place in with_marks.marks.items():
            if sign not in text:
                raise ValueError(
                    f"{place}: the chat template of {self.source} does not print it, so the model "
                    "would not see it; leave it out, or use a model or a template that knows it"
                )

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text; none if it is special or unknown."""
        if token_id in self.special_ids:
            return b""
        if token_id in self.written:
            return self.written[token_id]
        token = self.backend.id_to_token(token_id)
        return b"" if token is None else self.rules.token_bytes(token)

    def decode(
        self,
        ids: Sequence[int],
        *,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> str:
        """Return the text of `ids`, or what they add to the text of `prompt_ids`.

        Special tokens are written out only if they are not skipped. Bytes that are not UTF-8 become
        U+FFFD, one for each longest part of a character. Two differences to transformers: bytes
        that did form a character stay it when a broken one follows, where byte fallback there gives
        up the whole run; and `clean_up_tokenization_spaces`, which takes away spaces that the model
        wrote, is not done.
        """
        text = b"".join(map(self.token_bytes if skip_special_tokens else self._shown_bytes, ids))
        if self.drops_first_space(prompt_ids):
            text = text.removeprefix(b" ")
        return text.decode("utf-8", "replace")

    def _shown_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; of a special one its name."""
        if token_id not in self.special_ids:
            return self.token_bytes(token_id)
        return (self.backend.id_to_token(token_id) or "").encode()

    def drops_first_space(self, prompt_ids: Sequence[int]) -> bool:
        """Say whether a text that follows `prompt_ids` is shown without its first space.

        Only where the space is the first character of all, as in a tokenizer that puts one in
        front of every text.
        """
        return self.rules.strips_first_space and not any(map(self.token_bytes, prompt_ids))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chat:
    """A conversation, ready for a template.

    Attributes:
        template: Of the two that a model may have.
        messages: As it reads them.
        variables: What else it reads.
        continues: The answer goes on in the last message.
    """

    template: str
    messages: list[dict[str, Any]]
    variables: dict[str, Any]
    continues: bool


_CUT = "\u2e28end\u2e29"
"""Rare, and printable, so that neither JSON nor Python's repr escapes it in a template."""

_NOT_TOLD = re.compile(f"[{OWN}{UNKNOWN}]+")
"""A run of characters that are not of the messages."""


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"character {error.start + 1} of the text is half of a surrogate pair, which no token "
            "can hold; take it out"
        ) from error


def _is_found(text: str, value: Any) -> bool:
    """Whether some text in `value`, keys among them, has this one."""
    if isinstance(value, str):
        return text in value
    if isinstance(value, Mapping):
        value = [one for pair in value.items() for one in pair]
    return isinstance(value, list | tuple) and any(_is_found(text, one) for one in value)


def _control_pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    """Finds special tokens in a text."""
    longest_first = sorted(filter(None, tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Named:
    """A tokenizer whose special tokens have names that no text has; their ids are the same.

    Attributes:
        backend: The tokenizer.
        names: Of each special token, by its text.
    """

    backend: tokenizers.Tokenizer
    names: Mapping[str, str]


@functools.lru_cache(maxsize=16)
def _named_backend(backend: tokenizers.Tokenizer, special_ids: frozenset[int]) -> _Named:
    """The tokenizer that takes special tokens in a text for text.

    Raises:
        ValueError: If it is built so that its special tokens cannot have other names.
    """
    values = json.loads(backend.to_str())
    nonce = secrets.token_hex(16)
    tokens = [token for token in values["added_tokens"] if token["id"] in special_ids]
    renamed = {token["content"]: f"<|{nonce}-{token['id']}|>" for token in tokens}
    for token in tokens:
        token.update(content=renamed[token["content"]], special=True)
    model = values["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {renamed.get(text, text): i for text, i in model["vocab"].items()}
    else:  # pieces and their scores
        model["vocab"] = [[renamed.get(text, text), *rest] for text, *rest in model["vocab"]]
    if model.get("unk_token") is not None:
        model["unk_token"] = renamed.get(model["unk_token"], model["unk_token"])
    refused = "this tokenizer cannot take control tokens in a text for text; leave them out"
    try:
        named = tokenizers.Tokenizer.from_str(json.dumps(values))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{refused} ({error})") from error
    changed = {i: token.content for i, token in named.get_added_tokens_decoder().items()}
    kept = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
    if changed != {i: renamed.get(text, text) for i, text in kept.items()}:
        raise ValueError(f"{refused} (ids have moved)")
    return _Named(backend=named, names=renamed)
