# SPDX-License-Identifier: Apache-2.0
"""From evidence to the operation: a self-check's finding or a receipt, against a setting."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from detjax.diverge.divergence import Divergence
from detjax.diverge.find import find_divergence
from detjax.diverge.runs import ModelSource
from detjax.diverge.setting import RecordedAnswer, Setting, refuse_adapter
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.self_check.evidence import CheckDifference
from detjax.escaping import escaped
from detjax.models.loading import LoadedModel
from detjax.numerics import Build, NumericsProfile
from detjax.parallel.mesh import DP_AXIS, TP_AXIS
from detjax.proof.receipt import Receipt

_PROGRAM = re.compile(r"^(prefill|decode|verify|windows) \S+ (\d+)x(\d+)")
_ANSWER_TOKENS = 8
"""Of an answer that was checked again: so many of its last tokens are made again."""
_NEW_TOKENS = 3


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reproduction:
    """The prompt and the two settings of a search.

    Attributes:
        prompt: Token ids.
        a: Prefill, or as few rows as possible.
        b: The program that differs.
        sampling: One sequence, without stop strings.
    """

    prompt: tuple[int, ...]
    a: Setting
    b: Setting
    sampling: SamplingParams


def reproduction_of(
    difference: CheckDifference, *, profile: NumericsProfile, vocab_size: int, dp: int, tp: int
) -> Reproduction:
    """Return a prompt and settings that run the program which a self-check caught.

    The check of a program has no prompt. The prompt here is random tokens, as many as come before
    the probe, at most two splits. A longer one is cut so that the place in its split is the same.

    Raises:
        ValueError: If the difference names an unknown program.
    """
    params, stream = difference.sampling
    mesh: dict[str, Any] = {"dp": dp, "tp": tp}
    a = Setting(**mesh, batch=dp, path="prefill")
    if difference.row < 0:
        count = min(_ANSWER_TOKENS, len(difference.token_ids) - 1)
        prompt = difference.token_ids[:-count]
        b = Setting(**mesh, batch=8 * dp, row=3)
    else:
        found = _PROGRAM.match(difference.program)
        if found is None:
            raise ValueError(f"{difference.program!r} is no program")
        kind, rows, length = found[1], int(found[2]), int(found[3])
        count, split = _NEW_TOKENS, profile.attention_split
        at = difference.position
        at = at if at < 2 * split else split + at % split
        rng = np.random.default_rng([23, at])
        prompt = tuple(rng.integers(0, vocab_size, max(1, at)).tolist())
        wide = {**mesh, "batch": rows * dp, "row": difference.row}
        if kind == "prefill":
            a, b = Setting(**mesh, batch=dp), Setting(**wide, chunk=length)
        elif kind == "windows":
            raise ValueError(f"no setting has several windows a launch: {difference.program!r}")
        elif kind == "verify":
            b = Setting(**wide, mode="dvr")
        else:
            b = Setting(**wide, decode_steps=length)
    stream += params.noise_stream
    sampling = dataclasses.replace(
        params, max_tokens=count, n=1, best_of=0, stop=(), noise_stream=stream
    )
    return Reproduction(prompt=prompt, a=a, b=b, sampling=sampling)


def find_cause(difference: CheckDifference, source: ModelSource, model: LoadedModel) -> Divergence:
    """Find the first operation that differs, after a self-check has found a difference.

    Args:
        difference: The finding.
        source: Source of models for settings, as in `find_divergence`.
        model: On the mesh of the engine that found it.

    Raises:
        ValueError: If no setting runs the program.
    """
    reproduction = reproduction_of(
        difference,
        profile=model.profile,
        vocab_size=model.config.vocab_size,
        dp=model.mesh.shape[DP_AXIS],
        tp=model.mesh.shape[TP_AXIS],
    )
    return find_divergence(
        source, reproduction.prompt, reproduction.a, reproduction.b, sampling=reproduction.sampling
    )


def explain(difference: CheckDifference, model: LoadedModel) -> str:
    """Return `find_cause` as text for an engine's evidence, or why it found nothing."""
    try:
        return str(find_cause(difference, model, model))
    except (ValueError, NotImplementedError, RuntimeError, FloatingPointError) as error:
        return f"the operation could not be looked for: {error}"


def answer_of_receipt(receipt: Receipt) -> RecordedAnswer:
    """Return the answer of a receipt, which may be any of its prompt's sequences.

    Raises:
        ValueError: If its masks come from a grammar, or it was made with an adapter: no setting has
            them.
    """
    refuse_adapter(receipt.adapter)
    if receipt.sampling.structured_output is not None:
        raise ValueError("the receipt has structured_output, and settings have no grammars")
    return RecordedAnswer(
        prompt_token_ids=receipt.prompt_token_ids,
        token_ids=receipt.token_ids,
        logprobs=tuple(receipt.logprobs),
        fingerprint=receipt.numerics["fingerprint"],
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """The content of a file of evidence.

    Attributes:
        difference: What the self-check found.
        mesh: (dp, tp) of the engine.
        profile: Of the model.
        folder: Of the model; empty if its weights were random.
        build: The build that ran: field names of `Build` and their values.
        time: Time of writing, UTC.
        cause: The finding of the engine's own search; empty if there was none.
    """

    difference: CheckDifference
    mesh: tuple[int, int]
    profile: NumericsProfile
    folder: str
    build: dict[str, str]
    time: str
    cause: tuple[str, ...]

    @property
    def backend(self) -> str:
        """The backend that ran."""
        return self.build["backend"]

    @classmethod
    def read(cls, path: Path) -> "Evidence":
        """Read a file that an engine wrote.

        Raises:
            ValueError: If it is not a file of evidence.
            OSError: If it cannot be read.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            said = found["difference"]
            params, stream = said["sampling"]
            difference = CheckDifference(**{
                **said, "token_ids": tuple(said["token_ids"]),
                "sampling": (SamplingParams.from_dict(params), int(stream)),
            })  # fmt: skip
            return cls(
                difference=difference,
                mesh=(found["mesh"][DP_AXIS], found["mesh"][TP_AXIS]),
                profile=NumericsProfile(**found["profile"]),
                folder="" if found["folder"] == "None" else found["folder"],
                build={name: str(value) for name, value in found["build"].items()},
                time=found["time"],
                cause=tuple(map(str, found.get("cause", ()))),
            )
        except json.JSONDecodeError as error:
            raise ValueError(
                f"it is no evidence of a self-check, as it is not JSON: {error}"
            ) from error
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it is no evidence of a self-check: {error!r}") from error

    def notes(self, build: Build, *, is_found: bool) -> tuple[str, ...]:
        """Return the notes that a reader of the comparison needs.

        Args:
            build: The build that compared them.
            is_found: Whether a bit differed.
        """
        notes = [escaped(f"the self-check said at {self.time}: {self.difference}")]
        if self.cause:
            notes.append("the engine then found:\n  " + "\n  ".join(map(escaped, self.cause)))
        here = {name: str(value) for name, value in build.facts().items()}
        others = [
            f"{name} was {escaped(self.build.get(name, 'unknown'))} and is {value}"
            for name, value in here.items()
            if self.build.get(name) != value
        ]
        if others:
            notes.append(f"that was another build, which need not have this one's bits: "
                         f"{'; '.join(others)}")  # fmt: skip
        if not is_found:
            what = "" if self.difference.row < 0 else ", and other tokens came before the probe"
            notes.append(
                "so the difference did not come again. The fault may be of that machine or that "
                f"process, or come and go{what}: run this where the engine ran, and more than once"
            )
        return tuple(notes)
