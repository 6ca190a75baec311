# SPDX-License-Identifier: Apache-2.0
"""What tests of all sources of drafts share: requests, known drafts, unsafe verification."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.running import programs as programs_module


def mixed_requests(
    vocab_size: int,
    lengths: Sequence[int],
    *,
    max_tokens: int,
    stop_token_ids: Sequence[int] = (0, 7),
) -> list[Request]:
    """Five random prompts: greedy, sampled, filtered and penalised, with ends, and answered twice.

    Args:
        vocab_size: Of the model.
        lengths: Of the prompts, in tokens.
        max_tokens: Of each answer.
        stop_token_ids: Of the fourth.
    """
    rng = np.random.default_rng(5)
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 0.8, "seed": 1},
        {"temperature": 1.2, "seed": 2, "top_p": 0.8, "repetition_penalty": 1.2},
        {"stop_token_ids": tuple(stop_token_ids)},
        {"temperature": 0.7, "seed": 3, "n": 2},
    )
    return [
        Request(
            prompt_token_ids=tuple(int(t) for t in rng.integers(0, vocab_size, length)),
            sampling=SamplingParams(max_tokens=max_tokens, **kind),
        )
        for length, kind in zip(lengths, kinds, strict=True)
    ]


def drafts_of(text: Sequence[int] | np.ndarray) -> Callable:
    """What replaces the drafts of a `ProgramCache`: the token of each position of a text."""
    table = np.asarray(text, np.int32)

    def candidates(token_ids: Any, positions: Any) -> Any:
        return jnp.asarray(table)[jnp.clip(positions, 0, len(table) - 1)]

    return candidates


def every_third_wrong(text: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """A text of which every third token is another one."""
    right = np.asarray(text, np.int32)
    return np.where(np.arange(len(right)) % 3 == 1, (right + 1) % vocab_size, right)


def commit_drafts_unseen(monkeypatch: Any) -> None:
    """Make programs that are traced from now on commit drafts as if each were right.

    A control: acceptance by the draft itself, not by equality with the canonical token.

    Args:
        monkeypatch: Of pytest.
    """
    checked = programs_module.commit_window

    def commit_drafts(slots, slot, start, drafts, num_drafts, chosen):
        believed = jnp.concatenate([drafts, chosen[:, -1:]], axis=1)
        return checked(slots, slot, start, drafts, num_drafts, believed)

    monkeypatch.setattr(programs_module, "commit_window", commit_drafts)
