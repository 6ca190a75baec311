# SPDX-License-Identifier: Apache-2.0
"""What is done with the text of a request, in the server or in a `Worker`. Imports no JAX."""

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from detjax.engine.requests.checks import check_vocabulary
from detjax.engine.sampling.grammars import Grammars
from detjax.engine.sampling.structured_output import StructuredOutput
from detjax.models.tokenizer import Tokenizer

MASK_S = 0.02
"""Processor time that a mask of a form may take when the worker tries it. Ordinary ones take up
to 4 ms; the limits of `detjax.engine.sampling.grammars` bound those that it does not try."""

NUM_TRIED = 16
"""Masks that the worker tries."""

FORM_BYTES = 2**25
"""Memory that a compiled form may take; the server keeps the last 32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextTools:
    """What work needs: a tokenizer, and what compiles forms for its model, of so many tokens."""

    tokenizer: Tokenizer
    grammars: Grammars
    vocab_size: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> "TextTools":
        """The tools of a model; nothing is compiled yet."""
        read = tokenizer.backend.to_str
        grammars = Grammars(read, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
        return cls(tokenizer=tokenizer, grammars=grammars, vocab_size=vocab_size)


@runtime_checkable
class TextTask(Protocol):
    """Something to do. It goes to a worker by pickle, and comes back as MessagePack has it."""

    def run(self, tools: TextTools) -> Any:
        """Do it.

        Raises:
            ValueError: If it cannot be done; the message is for the client.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Encode:
    """Texts to token ids; with `is_raw` as `Tokenizer.encode_raw` does."""

    texts: Sequence[str]
    is_raw: bool = False

    def run(self, tools: TextTools) -> list[list[int]]:
        """The ids of each."""
        encode = tools.tokenizer.encode_raw if self.is_raw else tools.tokenizer.encode
        return [encode(text) for text in self.texts]


@dataclass(frozen=True, kw_only=True, slots=True)
class Template:
    """A conversation to token ids, through the model's template."""

    messages: Sequence[dict[str, Any]]
    variables: dict[str, Any]

    def run(self, tools: TextTools) -> list[int]:
        """The ids."""
        return tools.tokenizer.apply_chat_template(self.messages, variables=self.variables)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decode:
    """Token ids to text; with `shows_special` special tokens are written out in it."""

    prompts: Sequence[Sequence[int]]
    shows_special: bool = False

    def run(self, tools: TextTools) -> list[str]:
        """The text of each."""
        for ids in self.prompts:
            check_vocabulary(ids, "the text", tools.vocab_size)
        skips = not self.shows_special
        return [tools.tokenizer.decode(ids, skip_special_tokens=skips) for ids in self.prompts]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTexts:
    """Token ids to what the vocabulary calls them."""

    token_ids: Sequence[int]

    def run(self, tools: TextTools) -> list[str | None]:
        """The name of each; None of an id that the tokenizer does not have."""
        return [tools.tokenizer.backend.id_to_token(i) for i in self.token_ids]


@dataclass(frozen=True, kw_only=True, slots=True)
class Judge:
    """Compile a form and try some of its masks, to see what they cost."""

    form: StructuredOutput

    def run(self, tools: TextTools) -> None:
        """Refuse a form that is not valid, or that costs too much."""
        what, before = f"structured_output={self.form.kind}", _resident_bytes()
        guide, ids = tools.grammars.guide(self.form), []
        for _ in range(NUM_TRIED):
            begin_s = time.thread_time()
            try:
                allowed = ~guide.banned(ids)
            except ValueError as error:
                if not ids:
                    raise ValueError(f"{what} is refused: {error}") from error
                break  # WHY: a limit on this path, which a completion need not take
            if (took_s := time.thread_time() - begin_s) > MASK_S:
                raise ValueError(
                    f"{what} is refused: a mask takes {took_s:.3f} s, more than {MASK_S}; make the "
                    "form smaller"
                )
            following = np.flatnonzero(np.unpackbits(allowed.view(np.uint8), bitorder="little"))
            # Any path will do, if it is the same each time.
            ids.append(int(following[min(len(ids), len(following) - 1)]))
            if ids[-1] in tools.grammars.eos_token_ids:
                break
        if (took := _resident_bytes() - before) > FORM_BYTES:
            raise ValueError(
                f"{what} is refused: it takes {took >> 20} MiB, more than {FORM_BYTES >> 20}; make "
                "the form smaller"
            )


def _resident_bytes() -> int:
    """Memory of this process, less what it has freed; 0 where the system does not say."""
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc
        trim(0)
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096
    except OSError:
        return 0
