# SPDX-License-Identifier: Apache-2.0
"""A way to compute an answer, as a line of text: `tp=2,batch=8,chunk=16`."""

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from detjax.engine.config import MODES
from detjax.engine.outputs.completion import CompletionOutput

FORWARD_PATHS = ("decode", "prefill")


def refuse_adapter(sha256: str) -> None:
    """Refuse an answer that no setting gives.

    Raises:
        ValueError: If an adapter has this hash; "" is none.
    """
    if sha256:
        raise ValueError(
            f"it was made with the adapter {sha256}, and settings have no adapters; "
            "`detjax.replay` and `detjax.audit` compare it with --lora-modules"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """How a prompt is run. No setting of mode `invariant` or `dvr` may change a bit.

    Attributes:
        tp: Devices that share each layer.
        dp: Replicas.
        batch: Sequences that run at once, over all replicas: the prompt, and others with other
            tokens and lengths.
        row: Which of them is the prompt, from 0, in order of arrival.
        mode: `invariant`, `dvr` or `fast`.
        backend: `auto`, `portable`, `sm90` or `reference`. Another backend has other bits, but
            `reference` those of `sm90`.
        chunk: Prompt tokens of one prefill step.
        path: `decode` generates; `prefill` computes each token by a prefill of all before it.
        decode_steps: Tokens of a sequence in one launch.
        pages: Cache pages over all replicas; 0 is enough for all. Fewer mean preemption.

    Raises:
        ValueError: If a value is out of range, naming it.
    """

    tp: int = 1
    dp: int = 1
    batch: int = 1
    row: int = 0
    mode: str = "invariant"
    backend: str = "auto"
    chunk: int = 64
    path: str = "decode"
    decode_steps: int = 1
    pages: int = 0

    def __post_init__(self):
        """Check every range."""
        for name in ("tp", "dp", "batch", "chunk", "decode_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.row < self.batch:
            raise ValueError(f"row={self.row} must be from 0 to batch - 1 = {self.batch - 1}")
        if self.pages < 0:
            raise ValueError(f"pages={self.pages} must be at least 0")
        for name, choices in (("mode", MODES), ("path", FORWARD_PATHS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)} must be one of {choices}")
        if self.batch % self.dp:
            raise ValueError(f"batch={self.batch} must be a multiple of dp={self.dp}")

    @classmethod
    def parse(cls, text: str) -> "Setting":
        """Read `key=value,key=value`; a missing key has its default.

        Raises:
            ValueError: If a key is unknown or given twice, or a value is none of its kind.
        """
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, is_given, value = (piece.strip() for piece in part.partition("="))
            if name not in defaults:
                near = difflib.get_close_matches(name, defaults, n=1)
                hint = f"did you mean {near[0]}? " if near else ""
                raise ValueError(f"no setting {name!r}; {hint}known are {', '.join(defaults)}")
            if not is_given or not value:
                raise ValueError(f"{part!r} must be {name}=VALUE, as {name}={defaults[name]}")
            if name in values:
                raise ValueError(f"{name} is given twice in {text!r}")
            values[name] = value if isinstance(defaults[name], str) else _integer(name, value)
        return cls(**values)

    def __str__(self) -> str:
        """Return the text that `parse` reads, without defaults."""
        changed = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return ",".join(changed) or f"tp={self.tp},batch={self.batch}"


def _integer(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(f"{name}={text} must be an integer") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedAnswer:
    """An answer, however it was computed.

    Attributes:
        prompt_token_ids: As the model saw the prompt.
        token_ids: Generated ones.
        logprobs: Float32, of each.
        fingerprint: That of its numerics and build; empty if unknown.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[np.float32, ...]
    fingerprint: str = ""

    def __post_init__(self):
        """Check that there is something to compare."""
        if not self.prompt_token_ids or not self.token_ids:
            raise ValueError("an answer needs at least one token of the prompt and one of its own")
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(
                f"an answer of {len(self.token_ids)} tokens has {len(self.logprobs)} logprobs"
            )

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> "RecordedAnswer":
        """Read a line of `python -m detjax.generate --format jsonl`.

        Raises:
            ValueError: If a field is missing, the digest is not that of the rest, an adapter had a
                part in it, or the answer is not the first sequence of its prompt, whose noise no
                setting draws.
        """
        try:
            output = CompletionOutput.from_dict(entry)
        except (KeyError, TypeError) as error:
            raise ValueError(f"it is no answer: {error!r}") from error
        refuse_adapter(output.adapter)
        if output.index:
            raise ValueError(f"sequence={output.index} must be 0: ask for the prompt with n=1")
        return cls(
            prompt_token_ids=output.completion.prompt_token_ids,
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            fingerprint=output.fingerprint,
        )

    @classmethod
    def from_line(cls, line: str) -> "RecordedAnswer":
        """Read a JSON line. Raises ValueError as `from_dict` does, or if it is no JSON object."""
        entry = json.loads(line)
        if not isinstance(entry, dict):
            raise ValueError("an answer must be a JSON object")
        return cls.from_dict(entry)

    def bits(self, index: int) -> int:
        """The bits of a logprob."""
        return int(np.float32(self.logprobs[index]).view(np.uint32))
