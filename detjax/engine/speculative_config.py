# SPDX-License-Identifier: Apache-2.0
"""How an engine speculates, as vLLM's users say it. No JAX."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from detjax.defaults import EAGLE3, HEAD_QUANTIZATIONS, HEADS
from detjax.engine.config import DRAFT_MODEL, DRAFTS_OF_OTHERS
from detjax.engine.scheduling.drafters import (
    HOST_DRAFTERS,
    Drafter,
    Predictions,
    SuffixDecoding,
)
from detjax.engine.scheduling.suffix import SuffixOptions

SUFFIX = "suffix"
METHODS = ("ngram", SUFFIX, *DRAFTS_OF_OTHERS)
_SUFFIX_TOKENS = 8
_VERIFY_BATCHES = (1, 8)
MOST_TOKENS = 64
"""Most drafts of a window. Each counts only if all before it are right."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculativeConfig:
    """A source of drafts, and how many of them a window has. It changes no bit.

    Attributes:
        method: `ngram`: what followed the same tokens earlier in the text. `suffix`: what most
            often followed the longest suffix of the text, there or in earlier answers.
            `draft_model`: a
            smaller model of the same vocabulary. `eagle3`: an EAGLE-3 head of the model. `mtp`: the
            model's own head of multi-token prediction, in its folder.
        model: A folder in Hugging Face format or a Hugging Face id, of the draft model or head.
        quantization: What the matrices of a head are rounded to when it is loaded, "int8"; None
            leaves them in the model's dtype of weights.
        num_speculative_tokens: Drafts of a window.
        disable_by_batch_size: Most sequences that decode at once while drafts are made; 0 sets no
            limit.
        is_adaptive: Fewer drafts, or none, where these were quicker at the same load.
        suffix_decoding_max_tree_depth: Longest suffix that is matched, in tokens.
        suffix_decoding_max_cached_requests: Earlier answers that are matched too; 0 none.
        suffix_decoding_max_spec_factor: Most drafts, in lengths of the suffix that was found.
        suffix_decoding_min_token_prob: Least share of the places that continue as a draft does.

    Raises:
        ValueError: If a value is out of range, or does not go with another.
    """

    method: str
    model: str = ""
    quantization: str | None = None
    num_speculative_tokens: int = 3
    disable_by_batch_size: int = 32
    is_adaptive: bool = True
    suffix_decoding_max_tree_depth: int = SuffixOptions().max_depth
    suffix_decoding_max_cached_requests: int = SuffixOptions().max_cached
    suffix_decoding_max_spec_factor: float | int = SuffixOptions().max_factor
    suffix_decoding_min_token_prob: float | int = SuffixOptions().min_share

    def __post_init__(self):
        """Check every field."""
        if self.method not in METHODS:
            raise ValueError(f"method={self.method!r} must be one of {list(METHODS)}")
        self._check_suffix()
        for name, least, most in (
            ("num_speculative_tokens", 1, MOST_TOKENS),
            ("disable_by_batch_size", 0, 2**16),
            ("suffix_decoding_max_tree_depth", 2, 2**16),
            ("suffix_decoding_max_cached_requests", 0, 2**24),
        ):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise ValueError(f"{name}={value!r} must be an integer from {least} to {most}")
        if not isinstance(self.is_adaptive, bool):
            raise ValueError(f"is_adaptive={self.is_adaptive!r} must be true or false")
        if not isinstance(self.model, str):
            raise ValueError(f"model={self.model!r} must be a text")
        if (self.method in (DRAFT_MODEL, EAGLE3)) != bool(self.model):
            if self.model:
                raise ValueError(
                    f"model={self.model!r} is not used by method={self.method!r}; leave it out"
                )
            what = "an EAGLE-3 head" if self.method == EAGLE3 else "a draft model"
            raise ValueError(
                f"method={self.method!r} needs `model`, the folder or Hugging Face id of {what}"
            )
        self._check_quantization()

    def _check_quantization(self) -> None:
        """Check what a head is rounded to, and that nobody asks it of another source."""
        value = self.quantization
        if value is None:
            return
        if value not in HEAD_QUANTIZATIONS:
            allowed = ", ".join(map(repr, HEAD_QUANTIZATIONS))
            raise ValueError(f"quantization={value!r} must be {allowed} or null (None)")
        if self.method not in HEADS:
            others = " (a draft model is quantised if its folder is)"
            raise ValueError(
                f"quantization={value!r} is of a head, of method={' or '.join(map(repr, HEADS))}, "
                f"not {self.method!r}; leave it out" + others * (self.method == DRAFT_MODEL)
            )

    def _check_suffix(self) -> None:
        """Check the fractions, and that nothing is asked of another source."""
        for name, most in (
            ("suffix_decoding_max_spec_factor", float(MOST_TOKENS)),
            ("suffix_decoding_min_token_prob", 1.0),
        ):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value <= most:
                raise ValueError(f"{name}={value!r} must be a number from 0 to {most:g}")
        given = [
            field.name
            for field in dataclasses.fields(self)
            if field.name.startswith(SUFFIX) and getattr(self, field.name) != field.default
        ]
        if given and self.method != SUFFIX:
            raise ValueError(
                f"{given[0]} is for method={SUFFIX!r}, not {self.method!r}; leave it out"
            )

    @classmethod
    def of(cls, given: "SpeculativeConfig | Mapping[str, Any] | str") -> "SpeculativeConfig":
        """Read a configuration, its fields, or a JSON object of them.

        A model without a `method` is a draft model.

        Raises:
            ValueError: If it is no object, has a field that is not known, or a value does not fit.
        """
        if isinstance(given, SpeculativeConfig):
            return given
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except ValueError as error:
                raise ValueError(
                    f"{given} is no JSON object ({error}); write {_EXAMPLE}"
                ) from error
        if not isinstance(given, Mapping):
            raise ValueError(f"{given!r} must be an object, as in {_EXAMPLE}")
        known = [field.name for field in dataclasses.fields(cls)]
        if unknown := sorted(given.keys() - set(known)):
            raise ValueError(f"{unknown[0]!r} is no field; the fields are {', '.join(known)}")
        if "method" not in given:
            if "model" not in given:
                raise ValueError(f"neither a method nor a model is given; write {_EXAMPLE}")
            given = {"method": DRAFT_MODEL, **given}
        if given["method"] == SUFFIX:  # a long match is worth a long window
            given = {"num_speculative_tokens": _SUFFIX_TOKENS, **given}
        return cls(**given)

    def engine_options(self) -> dict[str, Any]:
        """Return the fields of `EngineConfig` that follow."""
        most = self.disable_by_batch_size
        options: dict[str, Any] = {
            "verify_window": self.num_speculative_tokens + 1,
            "max_draft_batch": most,
            "adapts_drafts": self.is_adaptive,
            # All that draft are verified in one launch, in each step.
            "verify_patience": 0,
        }
        if most:
            options["verify_rows"] = most
            options["verify_batches"] = tuple(n for n in _VERIFY_BATCHES if n < most)
        if self.method not in DRAFTS_OF_OTHERS:
            return options | {"has_prompt_lookup": True}
        return options | {"draft_weights": self.method}

    def drafters(self) -> tuple[Drafter, ...]:
        """Make the sources on the host of one engine; used where `engine_options` want any."""
        if self.method != SUFFIX:
            return HOST_DRAFTERS
        options = SuffixOptions(
            max_depth=self.suffix_decoding_max_tree_depth,
            max_cached=self.suffix_decoding_max_cached_requests,
            max_factor=self.suffix_decoding_max_spec_factor,
            min_share=self.suffix_decoding_min_token_prob,
        )
        return Predictions(), SuffixDecoding(options)

    def __str__(self) -> str:
        """Return it as a line for people."""
        source = " ".join(filter(None, (self.method, self.model, self.quantization)))
        limit = self.disable_by_batch_size
        until = f", to {limit} sequences at once" if limit else ""
        return f"{source}, {self.num_speculative_tokens} tokens a window{until}"


_EXAMPLE = '{"method": "draft_model", "model": "FOLDER", "num_speculative_tokens": 3}'
