# SPDX-License-Identifier: Apache-2.0
"""Compiles ahead, for `--warm`: what a later start will find on the disk."""

import time
from dataclasses import dataclass

from detjax.cli.arguments import GenerateArgs, sampling_params
from detjax.cli.model import CompilesPrograms, Progress


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """A program, and when it was ready, in seconds after the first was begun."""

    name: str
    ready_s: float


def warm(engine: CompilesPrograms, args: GenerateArgs, progress: Progress) -> tuple[Compiled, ...]:
    """Compile what requests with these options can need, several programs at a time.

    Plain programs, and those that filter, adjust, or report top logprobs where the options do.

    Args:
        engine: Which has computed nothing.
        args: The options.
        progress: Told (what, done, total).
    """
    sampling, begin_s = sampling_params(args), time.perf_counter()
    found = []

    def compiled(what: str, done: int, total: int) -> None:
        found.append(Compiled(name=what, ready_s=time.perf_counter() - begin_s))
        progress(what, done, total)

    engine.compile(
        compiled,
        with_filters=sampling.is_filtered,
        with_adjustments=sampling.is_adjusted,
        num_top_logprobs=sampling.num_top_logprobs,
    )
    return tuple(found)
