# SPDX-License-Identifier: Apache-2.0
"""What a head is that drafts from hidden states of a larger model. No JAX."""

from dataclasses import dataclass

from detjax.defaults import EAGLE3, MTP
from detjax.models.config import ModelConfig

HEAD_NAMES = {EAGLE3: "an EAGLE-3 head", MTP: "an MTP head"}
"""By method, for errors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadConfig:
    """One head: a decoder layer that reads a hidden state and the embedding of the token behind it.

    Attributes:
        method: `eagle3`: the layer projects both side by side. `mtp`: a matrix joins them before
            it.
        layer: Its decoder layer, with the vocabulary of the model that it drafts for.
        feature_layers: Layers of that model whose input residual streams the head reads; the number
            of layers stands for what the last one leaves.
        target_hidden_size: Of that model.
        draft_vocab_size: Tokens that the head can draft.
        norm_before_residual: Whether the layer of an `eagle3` adds to its normalised input, not to
            the input.
        hands_normalised: Whether an `mtp` reads the hidden state of the model, or of its own draft
            before, behind the last norm of either.
    """

    method: str
    layer: ModelConfig
    feature_layers: tuple[int, ...]
    target_hidden_size: int
    draft_vocab_size: int
    norm_before_residual: bool = False
    hands_normalised: bool = False

    @property
    def name(self) -> str:
        """Its kind, for errors."""
        return HEAD_NAMES[self.method]

    @property
    def features_width(self) -> int:
        """Numbers of a token that it reads."""
        return len(self.feature_layers) * self.target_hidden_size
