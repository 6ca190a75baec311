# SPDX-License-Identifier: Apache-2.0
"""Which tokens a form of output allows: a function of the form and the tokens so far alone.

llguidance compiles the form and computes masks, and holds Python's lock in neither. Its limits
count work, not time, so they too are the same on every machine. This imports no JAX.
"""

import importlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from detjax.serving.structured_output import StructuredOutput

_MAX_KEPT = 32
# WHY: what the worst forms take that pass each limit, on one core, in 2026-11. One unit of fuel may
# be the copy of a whole expression: `a?` 6,000 times compiles in 0.2 s and holds 77 MB, and its
# masks take 5 ms. 2,500 choices and 150 fields of three types pass.
_LIMITS = {
    "max_grammar_size": 100_000,  # symbols
    "initial_lexer_fuel": 50_000,
    "step_lexer_fuel": 10_000,
    "step_max_items": 5_000,  # about 3 ms
    "max_lexer_states": 20_000,  # of 1 to 2 kB
}


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

    def guide(self, form: StructuredOutput) -> "Guide":
        """Begin a completion of a form.

        Raises:
            ValueError: As `check` does.
        """
        num_words = -(-self._vocab_size // 32)  # as `detjax.serving.adjustments` has it
        return Guide(self._compiled(form).deep_copy(), num_words)

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
                self._tokenizer = library.LLTokenizer(
                    self._read_tokenizer(),
                    n_vocab=self._vocab_size,
                    eos_token=self.eos_token_ids,
                )
        limits = library.LLParserLimits(**_LIMITS, verbose_errors=False)
        matcher = library.LLMatcher(
            self._tokenizer, _grammar_of(library.LLMatcher, form), limits=limits, log_level=0
        )
        if matcher.is_error():
            raise ValueError(f"structured_output={form.kind} is refused: {matcher.get_error()}")
        return matcher


class Guide:
    """The form of one completion, and how far it is."""

    def __init__(self, matcher: Any, num_words: int):
        """Begin with no token."""
        self._matcher, self._num_words = matcher, num_words
        self._num_seen = 0

    def banned(self, output_ids: Sequence[int]) -> np.ndarray:
        """Bits of the tokens that may not follow the completion so far: int32 [n].

        Raises:
            ValueError: If the completion is not of the form, or a limit is passed.
        """
        new, self._num_seen = list(output_ids[self._num_seen :]), len(output_ids)
        allowed = np.zeros(0, np.int32)
        if self._matcher.consume_tokens(new):
            allowed = np.frombuffer(self._matcher.compute_bitmask(), "<i4")
        if self._matcher.is_error():
            raise ValueError(f"its form cannot go on: {self._matcher.get_error()}")
        return ~allowed[: self._num_words]


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
            choices = " | ".join(_quoted(choice) for choice in form.choices)
            return matcher.grammar_from_lark(f"start: {choices}")
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
