# SPDX-License-Identifier: Apache-2.0
"""What became of one prompt: its tokens and its sequences."""

from dataclasses import dataclass

from detjax.engine.outputs.completion import CompletionOutput, shortened
from detjax.engine.outputs.request_output import PromptLogprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptOutput:
    """What became of one prompt.

    Attributes:
        prompt: Its text; of a conversation, as the template has it; None where token ids were
            given.
        prompt_token_ids: As the model saw it.
        outputs: The prompt's `n` sequences.
        prompt_logprobs: Of the prompt's second token and so on; None where they were not asked for.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: PromptLogprobs | None = None

    def __repr__(self) -> str:
        """Short, for notebooks: a line of the prompt, and a line of each sequence."""
        prompt = None if self.prompt is None else shortened(self.prompt)
        scored = "" if self.prompt_logprobs is None else ", prompt_logprobs=..."
        outputs = "".join(f"\n  {output!r}," for output in self.outputs)
        return (
            f"PromptOutput(prompt={prompt!r}, num_prompt_tokens={len(self.prompt_token_ids)}"
            f"{scored}, outputs=[{outputs}\n])"
        )
