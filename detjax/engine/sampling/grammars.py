# SPDX-License-Identifier: Apache-2.0
"""Which tokens a form of output allows: a function of the form and the tokens so far alone.

llguidance compiles the form and computes masks, and holds Python's lock in neither. Its limits
count work, not time, so they too are the same on every machine. This imports no JAX.
"""

import importlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any

from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.sampling.guides import (
    SEEN_TO,
    GuidesTokens,
    MaskedGuide,
    MatcherGuide,
    bits_of_all_but,
    is_everything,
)
from detjax.engine.sampling.structured_output import StructuredOutput

_MAX_KEPT = 32
# WHY: what the worst forms take that pass each limit, on one core, in 2026-11. One unit of fuel may
# be the copy of a whole expression: `a?` 6,000 times compiles in 0.2 s and holds 77 MB, and its
# masks take 5 ms. 150 fields of three types pass.
_LIMITS = {
    "max_grammar_size": 100_000,  # symbols
    "initial_lexer_fuel": 50_000,
    "step_lexer_fuel": 10_000,
    "step_max_items": 5_000,  # about 3 ms
    "max_lexer_states": 20_000,  # of 1 to 2 kB
}


_CHOICE_LIMITS = _LIMITS | {"initial_lexer_fuel": 300_000, "step_lexer_fuel": 500_000}
"""What choices of 65,536 characters take, and more: none that compiles fails at a token. Their
masks take 10 ms at most, as one unit of fuel is a text's rest."""

_JSON_SPACE = r" |\n[ \t]{0,32}"
"""Between two parts of JSON, unless a schema says otherwise: what printers write, and no more. A
small model may otherwise write spaces until it has no more tokens."""


class Grammars:
    """Compiles forms for one model, and keeps the last ones."""

    def __init__(
        self,
        read_tokenizer: Callable[[], str],
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
    ):
        """Compile nothing yet.

        Args:
            read_tokenizer: Gives the tokenizer.json, when a form is first wanted.
            vocab_size: Of the model.
            eos_token_ids: Of the model: what ends a completion whose form is complete.
        """
        self._read_tokenizer = read_tokenizer
        self._vocab_size, self.eos_token_ids = vocab_size, list(eos_token_ids)
        self._lock = threading.Lock()  # of what is kept; nobody compiles under it
        self._reading = threading.Lock()
        self._tokenizer: Any = None
        self._kept: OrderedDict[StructuredOutput, Any] = OrderedDict()

    def check(self, form: StructuredOutput) -> None:
        """Compile a form.

        Raises:
            ValueError: If it is not valid, or too large; the message names it.
        """
        self._compiled(form)

    def guide(self, form: StructuredOutput) -> GuidesTokens:
        """Begin a completion of a form.

        Raises:
            ValueError: As `check` does.
        """
        past = bits_of_all_but(range(self._vocab_size), self._vocab_size)
        return MatcherGuide(self._compiled(form).deep_copy(), past)

    def check_masks(self, sampling: SamplingParams, *, ends: Collection[int]) -> None:
        """Refuse masks beside a form that leave no token to begin with.

        Args:
            sampling: Has a form, and no texts.
            ends: End tokens of the request.

        Raises:
            ValueError: If they do, or as `check` does.
        """
        form = sampling.structured_output
        assert form is not None
        has_masks = any(getattr(sampling, name) for name in SEEN_TO)
        if has_masks and is_everything(self.masked(sampling, ends=ends).banned(())):
            raise ValueError(
                f"structured_output={form.kind} leaves no token to begin with that "
                "allowed_token_ids, bad_words and min_tokens allow; change one of them"
            )

    def masked(self, sampling: SamplingParams, *, ends: Collection[int]) -> MaskedGuide:
        """Begin a completion of a form, with the other masks of its request.

        Raises:
            ValueError: As `check` does.
        """
        assert sampling.structured_output is not None
        return MaskedGuide(
            self.guide(sampling.structured_output),
            sampling,
            vocab_size=self._vocab_size,
            form_ends=self.eos_token_ids,
            ends=ends,
        )

    def _compiled(self, form: StructuredOutput) -> Any:
        with self._lock:
            if form in self._kept:
                self._kept.move_to_end(form)
                return self._kept[form]
        compiled = self._compile(form)
        with self._lock:
            self._kept[form] = compiled
            while len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return compiled

    def _compile(self, form: StructuredOutput) -> Any:
        library = _library()
        if not self.eos_token_ids:
            raise ValueError(
                f"structured_output={form.kind} needs a model with an end token, and this has none"
            )
        with self._reading:
            if self._tokenizer is None:
                self._tokenizer = self._read(library)
        most = _CHOICE_LIMITS if form.kind == "choice" else _LIMITS
        limits = library.LLParserLimits(**most, verbose_errors=False)
        try:
            grammar = _grammar_of(library.LLMatcher, form)
        except ValueError as error:  # as of brackets that are nested too deeply
            raise ValueError(f"structured_output={form.kind} is refused: {error}") from error
        matcher = library.LLMatcher(self._tokenizer, grammar, limits=limits, log_level=0)
        if matcher.is_error():
            raise ValueError(f"structured_output={form.kind} is refused: {matcher.get_error()}")
        return matcher

    def _read(self, library: Any) -> Any:
        """The tokenizer, with all of its tokens: it may have more than the model."""
        text = self._read_tokenizer()
        values = json.loads(text)
        vocab = values["model"]["vocab"]
        ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
        most = max([*ids, *(token["id"] for token in values["added_tokens"])], default=0)
        return library.LLTokenizer(
            text, n_vocab=max(self._vocab_size, most + 1), eos_token=self.eos_token_ids
        )


def _grammar_of_schema(matcher: Any, spec: str) -> str:
    """The grammar of a JSON schema, whose `x-guidance` may choose another space."""
    schema = json.loads(spec)
    if schema is True:
        schema, spec = {}, "{}"  # the same, and may have options
    given = schema.get("x-guidance", {}) if isinstance(schema, dict) else None
    if not isinstance(given, dict) or "whitespace_flexible" in given:
        return matcher.grammar_from_json_schema(spec)
    return matcher.grammar_from_json_schema(spec, defaults={"whitespace_pattern": _JSON_SPACE})


def _grammar_of(matcher: Any, form: StructuredOutput) -> str:
    match form.kind:
        case "json_schema":
            return _grammar_of_schema(matcher, form.spec)
        case "json_object":
            return _grammar_of_schema(matcher, '{"type": "object"}')
        case "regex":
            return matcher.grammar_from_regex(form.spec)
        case "choice":
            # WHY: one terminal, as a parser keeps an item for each alternative, of 2,000 at most.
            # The masks are the same.
            choices = " | ".join(_quoted(choice) for choice in form.choices)
            return matcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
    return matcher.grammar_from_lark(form.spec)


def _quoted(text: str) -> str:
    """A text as a terminal of Lark."""
    escaped = "".join(
        c if c.isalnum() or c == " " else f"\\u{ord(c):04x}" if ord(c) < 2**16 else c for c in text
    )
    return f'"{escaped}"'


def _library() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise ValueError(
            f'structured_output needs llguidance ({error}); pip install "detjax[structured]"'
        ) from error
