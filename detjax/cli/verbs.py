# SPDX-License-Identifier: Apache-2.0
"""The commands that there are: `python -m detjax VERB`. Imports none of them."""

import difflib
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Verb:
    """A command: the module that runs it, and what it does in one line."""

    module: str
    does: str


VERBS = {
    "generate": Verb(
        module="detjax.generate",
        does="continue prompts; check that the answers have the same bits in every run",
    ),
    "serve": Verb(
        module="detjax.serve",
        does="serve a model over HTTP with OpenAI's API, with the same bits under any load",
    ),
    "run_batch": Verb(
        module="detjax.run_batch",
        does="answer a file of requests in the format of OpenAI's batch API",
    ),
    "eval": Verb(
        module="detjax.eval",
        does="run lm-evaluation-harness, with the same scores at any batch size and mesh",
    ),
    "certify": Verb(
        module="detjax.certify",
        does="test the claims on this machine, for a model and a configuration",
    ),
    "replay": Verb(
        module="detjax.replay",
        does="run receipts again, in another batch and mesh, and compare every bit",
    ),
    "audit": Verb(
        module="detjax.audit",
        does="check receipts by prefill, at a fraction of the cost of decoding",
    ),
    "diverge": Verb(
        module="detjax.diverge",
        does="find the first token, layer and operation whose bits differ",
    ),
    "compare": Verb(
        module="detjax.compare",
        does="count the differences between two sets of answers, and compare scores",
    ),
    "quantize": Verb(
        module="detjax.quantize",
        does="make an 8-bit or 4-bit copy of a model, by rounding to nearest",
    ),
    "convert_gguf": Verb(
        module="detjax.convert_gguf",
        does="convert a GGUF file to a folder in Hugging Face format",
    ),
    "grpo": Verb(
        module="detjax.grpo",
        does="train a model with GRPO; rollouts and trainer have the same logprobs, bit for bit",
    ),
}
"""In the order in which a reader meets them."""

USAGE = "usage: python -m detjax COMMAND [options]"


def help_text() -> str:
    """What `python -m detjax --help` says."""
    width = max(map(len, VERBS))
    lines = (f"  {name:<{width}}  {verb.does}" for name, verb in VERBS.items())
    return "\n".join(
        (
            USAGE,
            "",
            "Inference whose token ids and logprobs have the same bits in any batch.",
            "",
            "commands:",
            *lines,
            "",
            "options:",
            "  -h, --help  show this help message and exit",
            "  --version   show the version and exit",
            "",
            "examples:",
            '  python -m detjax generate -p "It was a dark night"',
            "  python -m detjax serve --help",
            "",
        )
    )


def unknown_verb(given: str) -> str:
    """What is said of a verb that there is not; it names the nearest."""
    near = difflib.get_close_matches(given, VERBS, n=1, cutoff=0.5)
    begun = [name for name in VERBS if given and name.startswith(given)]
    hint = f"did you mean {(begun or near)[0]}? " if begun or near else ""
    return f"{given!r} is not a command of detjax; {hint}commands are {', '.join(VERBS)}"
