# SPDX-License-Identifier: Apache-2.0
"""What a model's authors recommend: the sampling of its generation_config.json."""

from pathlib import Path
from typing import Any

from detjax.models.hf_values import read_object

FILE = "generation_config.json"

_FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Of the file, and of `SamplingParams`."""

_DECIDE_NOTHING = frozenset(
    """
    _from_model_config bos_token_id decoder_start_token_id do_sample eos_token_id max_length
    output_attentions output_hidden_states output_scores pad_token_id return_dict_in_generate
    transformers_version use_cache
    """.split()
)
"""Keys that are read elsewhere, or change no token. `max_length` counts the prompt too, and is
Hugging Face's limit where nothing else limits."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,), "num_beam_groups": (1,), "num_return_sequences": (1,), "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,), "eta_cutoff": (0.0,), "diversity_penalty": (0.0,),
    "length_penalty": (1.0,), "no_repeat_ngram_size": (0,), "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,), "renormalize_logits": (False,), "remove_invalid_values":
    (False,), "early_stopping": (False,), "min_length": (0,), "penalty_alpha": (0.0,),
    "top_h": (1.0,),
}  # fmt: skip
"""Keys that detjax does not have, with the values that ask for nothing; null always does."""


def default_sampling(folder: Path) -> dict[str, Any]:
    """Return fields of `SamplingParams` that a model's folder recommends; none without the file.

    As Hugging Face reads it: without `do_sample` an answer is greedy, and what shapes samples does
    not count; with it the temperature is 1 if the file names none.

    Raises:
        ValueError: If the file asks for what detjax does not do, naming the key and its value.
    """
    path = folder / FILE
    if not path.is_file():
        return {}
    values = read_object(path)
    for key, value in values.items():
        is_known = key in _FIELDS or key in _DECIDE_NOTHING
        if not is_known and value is not None and value not in _NEUTRAL.get(key, ()):
            raise ValueError(
                f"{path} asks for {key}={value!r:.60}, which detjax does not do; leave the "
                "file out with --generation-config none (generation_config='none')"
            )
    given = {_FIELDS[key]: values[key] for key in _FIELDS if values.get(key) is not None}
    if not values.get("do_sample"):
        kept = "repetition_penalty", "max_tokens"
        return {name: value for name, value in given.items() if name in kept}
    fields = {"temperature": 1.0, **given}
    return {
        name: float(value) if name not in ("top_k", "max_tokens") else value
        for name, value in fields.items()
    }
