# SPDX-License-Identifier: Apache-2.0
"""What form a completion must have, as plain data."""

import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_SPEC_LEN = 2**16
"""Characters of a schema, an expression, a grammar or all choices."""

FORMS = ("json_schema", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOutput:
    """The form of a completion: exactly one of five, named by `kind`.

    Attributes:
        kind: "json_schema", "json_object" (any JSON object), "regex", "choice" (one of several
            texts) or "grammar" (in llguidance's variant of Lark).
        spec: The schema as JSON, the regular expression, the choices as a list in JSON, or the
            grammar; empty for "json_object".

    Raises:
        ValueError: If there is no such kind, or `spec` is not of it or longer than `MAX_SPEC_LEN`.
    """

    kind: str
    spec: str = ""

    def __post_init__(self):
        """Check what needs no library."""
        if self.kind not in FORMS:
            raise ValueError(f"structured_output={self.kind!r} must be one of {FORMS}")
        if not isinstance(self.spec, str) or bool(self.spec) is (self.kind == "json_object"):
            given = "nothing" if self.kind == "json_object" else "a text that is not empty"
            raise ValueError(f"structured_output={self.kind} takes {given}, not {self.spec!r:.60}")
        if len(self.spec) > MAX_SPEC_LEN:
            raise ValueError(
                f"structured_output={self.kind} has {len(self.spec)} characters, more than "
                f"{MAX_SPEC_LEN}"
            )
        if self.kind == "json_schema" and not isinstance(self._parsed(), Mapping | bool):
            raise ValueError(f"structured_output=json_schema {self.spec!r:.60} is no JSON object")
        if self.kind == "choice" and not _are_texts(self._parsed()):
            raise ValueError(
                f"structured_output=choice {self.spec!r:.60} is no list of texts that are not empty"
            )

    @classmethod
    def of_choices(cls, choices: Sequence[str]) -> "StructuredOutput":
        """One of these texts; one text alone is refused, as it is a sequence of characters.

        Raises:
            ValueError: If `choices` is a text, or has what is no text.
        """
        if isinstance(choices, str | bytes):
            raise ValueError(f"choices={choices!r:.60} is one text; give a list, even of one text")
        return cls(kind="choice", spec=json.dumps(list(choices), ensure_ascii=False))

    @classmethod
    def of_schema(cls, schema: Mapping[str, Any] | str) -> "StructuredOutput":
        """JSON of this schema, given as an object or as JSON."""
        spec = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
        return cls(kind="json_schema", spec=spec)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "StructuredOutput":
        """What JSON has: `kind`, `spec`, and perhaps the `library` that made the masks.

        Raises:
            ValueError: If it has other fields, or the library is another than the one here.
        """
        if values.keys() - {"kind", "spec", "library"} or "kind" not in values:
            raise ValueError(f"structured_output={dict(values)!r:.60} must have `kind` and `spec`")
        form = cls(kind=values["kind"], spec=values.get("spec", ""))
        library = values.get("library")
        if library is not None and library != form.library:
            raise ValueError(
                f"structured_output.library is {library!r}, and {form.library!r} is installed, "
                "whose masks may be others; install that version"
            )
        return form

    @property
    def library(self) -> str:
        """What computes the masks, with its version, which is a part of what was asked."""
        return f"llguidance {importlib.metadata.version('llguidance')}"

    @property
    def choices(self) -> list[str]:
        """The texts of "choice"."""
        return self._parsed()

    def _parsed(self) -> Any:
        try:
            return json.loads(self.spec)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"structured_output={self.kind} is not JSON: {error}") from error


def _are_texts(values: Any) -> bool:
    return (
        isinstance(values, list)
        and bool(values)
        and all(isinstance(value, str) and value for value in values)
    )
