# SPDX-License-Identifier: Apache-2.0
"""Strict mapping of Hugging Face's `config.json` to `ModelConfig`.

Two forms are read: the published older one (`rope_theta`, `rope_scaling`, `torch_dtype`) and that
of transformers 5 (`rope_parameters`, `dtype`, `layer_types`). A family is data (`Family`, one file
a family); the rules here are common to all of them. Every key of the file must be known: mapped,
or checked to hold the one value that is computed here, or listed as unable to change a logit. Any
other key is refused, because a key that is skipped may be the one that changes the model.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from detjax.models.config import ExpertConfig, ModelConfig
from detjax.models.family import BiasRule, Family
from detjax.models.hf_layers import layer_ropes, linear_attention, sliding_windows
from detjax.models.hf_rope import scaled_context
from detjax.models.hf_values import flag_of, int_of, number_of, read_object
from detjax.models.quantization.scheme import QuantizationScheme, parse_quantization
from detjax.models.registry import find_family, wrapped_families
from detjax.models.tokenizer_files import read_eos_id
from detjax.pallas_kernels.swiglu.clamp import SwigluClamp

CHECKED_KEYS: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "chunk_size_feed_forward": (0,),
    "cross_attention_hidden_size": (None,),
    "hidden_act": ("silu",),
    "is_causal": (True,),
    "is_decoder": (False,),
    "is_encoder_decoder": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1, None),
    "per_layer_config": (None, {}),
    "pretraining_tp": (1, None),
    "pruned_heads": (None, {}),
    "qk_layer_norms": (False,),
    "rope_interleaved": (False,),
    "tie_encoder_decoder": (False,),
    "use_mrope": (False,),
}
"""Keys with the only values that detjax computes; any other value is refused."""

INERT_KEYS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path
    attention_dropout attn_implementation auto_map dtype finetuning_task id2label initializer_range
    is_llama_config is_qwen2_config label2id max_sequence_length name_or_path neftune_noise_alpha
    num_labels output_attentions output_hidden_states pad_token_id
    prefix problem_type return_dict sep_token_id task_specific_params tf_legacy_loss
    tie_last_hidden_states tokenizer_class torch_dtype torchscript transformers.js_config
    transformers_version
    unsloth_fixed unsloth_version use_bfloat16 use_cache
    bad_words_ids begin_suppress_tokens decoder_start_token_id diversity_penalty do_sample
    early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty
    forced_bos_token_id forced_eos_token_id length_penalty max_length min_length
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores
    remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens temperature
    top_k top_p typical_p
    """.split()
)
"""Keys that cannot change a logit: bookkeeping, training, other tasks, generation defaults.

`auto_map` names code of the folder, which transformers runs only if it is told to trust it: the
architecture is what is computed.
"""


READ_KEYS = frozenset(
    {"architectures", "compression_config", "layer_types", "model_type", "quantization_config"}
)
"""Keys that are read here for every family, beside `Family.defaults` and the rotary ones."""


ROPE_KEYS = frozenset({"rope_theta", "rope_scaling", "rope_parameters"})


def config_from_hf(
    values: Mapping[str, Any], *, generation: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Map a parsed `config.json` to a `ModelConfig`.

    Args:
        values: The parsed file.
        generation: The parsed `generation_config.json`, if there is one. Its `eos_token_id` is
            added to that of `values`; nothing else of it is used.

    Raises:
        ValueError: If the architecture or a key is unknown, or a value is not supported or not
            possible. The message names the key, its value and what to do.
    """
    values = decoder_values(values)
    family = find_family(values.get("architectures"))
    parse_quantization(values)
    return _model_config(values, family=family, generation=generation or {})


def read_quantization(folder: Path) -> QuantizationScheme | None:
    """How the weights of a Hugging Face folder are quantised; None if they are not.

    Raises:
        ValueError: If config.json is not JSON, or its format of quantisation is not supported.
    """
    path = folder / "config.json"
    if not path.is_file():
        return None
    try:
        return parse_quantization(read_object(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def load_config(folder: Path) -> ModelConfig:
    """Read `config.json`, and `generation_config.json` if present, of a Hugging Face folder.

    The end token that `tokenizer_config.json` names is one of `eos_token_ids`, too: an answer ends
    in the same place whether or not the one who asks has made a tokenizer.

    Raises:
        FileNotFoundError: If `folder` has no `config.json`.
        ValueError: If a file is not JSON, or asks for something that is not supported.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; give a folder with a Hugging Face model")
    generation_path = folder / "generation_config.json"
    generation = read_object(generation_path) if generation_path.is_file() else {}
    values, at = read_object(path), path
    try:
        config = config_from_hf(values)
        at = generation_path
        others = _generation_eos_ids(generation, config.vocab_size)
    except ValueError as error:
        raise ValueError(f"{at}: {error}") from error
    eos_id = read_eos_id(folder)
    others = others if eos_id is None else (*others, eos_id)
    eos_ids = tuple(dict.fromkeys([*config.eos_token_ids, *others]))
    return dataclasses.replace(config, eos_token_ids=eos_ids)


def _generation_eos_ids(generation: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """The end tokens that a `generation_config.json` names."""
    return _token_ids({"eos_token_id": None, **generation}, "eos_token_id", vocab_size)


def _model_config(
    values: Mapping[str, Any], *, family: Family, generation: Mapping[str, Any]
) -> ModelConfig:
    """Map the keys of a `config.json` by the rules of its family."""
    _check_keys(values, family)
    full = {**family.defaults, **values}
    hidden_size, num_heads = int_of(full, "hidden_size"), int_of(full, "num_attention_heads")
    vocab_size, eps = int_of(full, "vocab_size"), number_of(full, "rms_norm_eps")
    max_position = int_of(full, "max_position_embeddings")
    eos_ids = (
        *_token_ids(full, "eos_token_id", vocab_size),
        *_generation_eos_ids(generation, vocab_size),
    )
    if len(bos_ids := _token_ids(full, "bos_token_id", vocab_size)) > 1:
        raise ValueError(f"bos_token_id={full['bos_token_id']!r} must be one id or null")
    head_dim = _head_dim(full, hidden_size=hidden_size, num_heads=num_heads)
    linear = linear_attention(full, family)
    windows = (None,) * len(linear.layers) if linear else sliding_windows(full, family)
    ropes, rope_of_layer = layer_ropes(
        values, family, windows=windows, head_dim=head_dim, max_len=max_position
    )
    scales = _scales(full, family, head_dim=head_dim)
    return ModelConfig(
        family=family.name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=int_of(full, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(full, num_heads),
        head_dim=head_dim,
        intermediate_size=int_of(full, "intermediate_size"),
        # The residual stream is kept without its multiplier: the norms see the same direction.
        rms_norm_eps=eps / scales.residual**2,
        rope=dataclasses.replace(ropes[0], scale=scales.attention),
        max_position_embeddings=scaled_context(ropes[0], max_position),
        tie_word_embeddings=flag_of(full, "tie_word_embeddings"),
        qkv_bias=_has_bias(family.qkv_bias, full),
        o_bias=_has_bias(family.o_bias, full),
        qk_norm=_has_qk_norm(full, family),
        sliding_windows=windows,
        bos_token_id=bos_ids[0] if bos_ids else None,
        eos_token_ids=tuple(dict.fromkeys(eos_ids)),
        experts=_experts(values, full, family),
        other_ropes=tuple(dataclasses.replace(r, scale=scales.attention) for r in ropes[1:]),
        layer_ropes=rope_of_layer,
        norms=family.norms,
        is_qk_norm_whole=family.is_qk_norm_whole,
        gating=family.gating,
        embedding_scale=scales.embedding / scales.residual,
        gain_offset=family.gain_offset,
        logits_scale=1 / scales.logits,
        has_sinks=family.has_sinks,
        attention_softcap=_softcap(full, "attn_logit_softcapping"),
        logits_softcap=_softcap(full, "final_logit_softcapping"),
        linear_attention=linear,
        has_output_gate=family.has_output_gate,
        num_spare_layers=_num_spare_layers(values, full, family),
    )


_OF_WHOLE = frozenset(
    {"bos_token_id", "compression_config", "eos_token_id", "quantization_config"}
    | {"tie_word_embeddings"}
)
"""Keys that a model with several parts may have beside its decoder's."""


def decoder_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of the text decoder, of a model that has it among other parts."""
    families = wrapped_families(values.get("architectures"))
    if not families:
        return values
    (first, _), others = next(iter(families.values())), {**values}
    section = others.pop(first.section, None)
    if not isinstance(section, dict):
        raise ValueError(
            f"{first.section}={section!r:.80} must be an object: the configuration of the text "
            f"decoder of {first.architecture!r}"
        )
    name = section.get("model_type", next(iter(families)))
    if not isinstance(name, str) or name not in families:
        raise ValueError(
            f"model_type={name!r:.80} in {first.section!r} of {first.architecture!r} is not "
            f"supported; detjax has {' and '.join(map(repr, families))}"
        )
    wrapper, family = families[name]
    known = _OF_WHOLE | wrapper.inert | INERT_KEYS | {"architectures", "model_type"}
    if unknown := sorted(others.keys() - known):
        raise ValueError(
            f"{unknown[0]}={others[unknown[0]]!r:.80} is not a key that detjax knows beside "
            f"{wrapper.section!r} of {wrapper.architecture!r}, and it may change what the model "
            "computes; if it cannot, remove it from config.json"
        )
    if others.get("model_type", wrapper.model_type) != wrapper.model_type:
        raise ValueError(
            f"model_type={others['model_type']!r} does not go with {wrapper.architecture!r}, which "
            f"is {wrapper.model_type!r}; correct one"
        )
    own = {key: others[key] for key in _OF_WHOLE & others.keys()}
    for key in own.keys() & section.keys():
        if own[key] != section[key]:
            raise ValueError(
                f"{key}={own[key]!r:.80} contradicts the {section[key]!r:.80} in "
                f"{wrapper.section!r}; keep one"
            )
    return {**section, **own, "architectures": list(family.architectures)}


class _Scales(NamedTuple):
    """Multipliers of a model.

    Attributes:
        embedding: Of embeddings.
        residual: Of what is added to the residual stream.
        attention: Of queries and of keys, beside the usual `1 / sqrt(head_dim)` of scores.
        logits: What logits are divided by.
    """

    embedding: float
    residual: float
    attention: float
    logits: float


def _scales(values: Mapping[str, Any], family: Family, *, head_dim: int) -> _Scales:
    """The multipliers of a family that has them; 1 for others."""

    def of(key: str) -> float:
        return number_of(values, key) if key in family.defaults else 1.0

    attention = 1.0
    if "attention_multiplier" in family.defaults:
        attention = math.sqrt(of("attention_multiplier") * math.sqrt(head_dim))
    elif "query_pre_attn_scalar" in family.defaults:
        attention = math.sqrt(math.sqrt(head_dim / of("query_pre_attn_scalar")))
    embedding = of("embedding_multiplier")
    if family.scales_embedding:
        embedding = math.sqrt(int_of(values, "hidden_size"))
    return _Scales(embedding, of("residual_multiplier"), attention, of("logits_scaling"))


def _softcap(values: Mapping[str, Any], key: str) -> float | None:
    return None if values.get(key) is None else number_of(values, key)


def _check_keys(values: Mapping[str, Any], family: Family) -> None:
    """Refuse every key that is not known, and every value that is not computed."""
    mapped = family.defaults.keys() | family.inert | INERT_KEYS | READ_KEYS | ROPE_KEYS
    mapped = mapped.union(family.spare_layers)
    if family.experts is not None:
        mapped = mapped.union(family.experts.num_experts, family.experts.top_k)
        mapped = mapped.union(*family.experts.copies.values())
    if family.partial_rotary is not None:
        mapped = mapped | {"partial_rotary_factor"}
    checked = {**CHECKED_KEYS, **family.checked, **family.unread}
    for key, value in values.items():
        if key in mapped:
            continue
        if key not in checked:
            raise ValueError(
                f"{key}={value!r} is not a key that detjax knows for {family.name!r}. Unknown keys "
                "are refused, because one may change what the model computes. If this key cannot, "
                "remove it from config.json, or add it to INERT_KEYS in detjax/models/hf_config.py "
                "for every model; if it can, this model is not supported"
            )
        if value not in checked[key]:
            supported = " or ".join(repr(v) for v in checked[key])
            if key in family.unread:
                raise ValueError(
                    f"{key}={value!r} is not supported for {family.name!r}: transformers does not "
                    f"read it there, and computes {supported}; correct it, or remove it"
                )
            raise ValueError(
                f"{key}={value!r} is not supported for {family.name!r}; detjax computes "
                f"{key}={supported} only"
            )
    if values.get("model_type", family.name) != family.name:
        raise ValueError(
            f"model_type={values['model_type']!r} does not go with "
            f"architectures={values.get('architectures')!r}, which is {family.name!r}; correct one"
        )


def _token_ids(values: Mapping[str, Any], key: str, vocab_size: int) -> tuple[int, ...]:
    """No id, one id or a list of ids, each in the vocabulary."""
    given = values[key]
    ids = given if isinstance(given, list) else [] if given is None else [given]
    for token_id in ids:
        is_int = isinstance(token_id, int) and not isinstance(token_id, bool)
        if not is_int or not 0 <= token_id < vocab_size:
            raise ValueError(
                f"{key}={given!r} must hold ids from 0 to {vocab_size=} - 1, or be null"
            )
    return tuple(ids)


def _num_kv_heads(values: Mapping[str, Any], num_heads: int) -> int:
    """As many as query heads where the file has none."""
    if values["num_key_value_heads"] is None:
        return num_heads
    num_kv_heads = int_of(values, "num_key_value_heads")
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_attention_heads={num_heads} must be a multiple of "
            f"num_key_value_heads={num_kv_heads}; correct the file"
        )
    return num_kv_heads


def _head_dim(values: Mapping[str, Any], *, hidden_size: int, num_heads: int) -> int:
    if values["head_dim"] is None:
        if hidden_size % num_heads:
            raise ValueError(
                f"{hidden_size=} must be a multiple of num_attention_heads={num_heads} where "
                "head_dim is absent; correct the file or give head_dim"
            )
        head_dim = hidden_size // num_heads
    else:
        head_dim = int_of(values, "head_dim")
    if head_dim % 2:
        raise ValueError(f"{head_dim=} must be even, as rotary embedding pairs the channels")
    return head_dim


def _has_bias(rule: BiasRule, values: Mapping[str, Any]) -> bool:
    if rule in (BiasRule.AS_CONFIGURED, BiasRule.OUT_AS_CONFIGURED):
        return flag_of(values, rule.value)
    return rule is BiasRule.ALWAYS


def _has_qk_norm(values: Mapping[str, Any], family: Family) -> bool:
    if "use_qk_norm" in family.defaults:
        return flag_of(values, "use_qk_norm")
    return family.qk_norm


def _num_spare_layers(given: Mapping[str, Any], values: Mapping[str, Any], family: Family) -> int:
    """Layers behind the decoder's that a checkpoint may hold."""
    if not family.spare_layers:
        return 0
    return _of_one_name(given, values, family.spare_layers, minimum=0)[1]


def _experts(
    given: Mapping[str, Any], values: Mapping[str, Any], family: Family
) -> ExpertConfig | None:
    """Mixtures of experts, and which layers have one; `values` are `given` and defaults."""
    keys = family.experts
    if keys is None:
        return None
    name, num_experts = _of_one_name(given, values, keys.num_experts, copies=keys.copies)
    top_k_name, top_k = _of_one_name(given, values, keys.top_k, copies=keys.copies)
    if top_k > num_experts:
        raise ValueError(
            f"{top_k_name}={top_k} must be at most {name}={num_experts}; correct the file"
        )
    layers = _expert_layers(values) if keys.layers else [True] * int_of(values, "num_hidden_layers")
    if keys.first_dense is not None:
        first = int_of(values, keys.first_dense, minimum=0)
        layers = [i >= first for i in range(len(layers))]
    if not any(layers):
        return None
    width, shared_width = int_of(values, keys.width), 0
    if keys.shared_width is not None:
        shared_width = int_of(values, keys.shared_width)
    elif keys.num_shared is not None:
        shared_width = width * int_of(values, keys.num_shared)
    return ExpertConfig(
        num_experts=num_experts,
        top_k=top_k,
        width=width,
        renormalise=keys.renormalise is None or flag_of(values, keys.renormalise),
        layers=tuple(layers),
        clamp=None if keys.clamp is None else _clamp(values, *keys.clamp),
        shared_width=shared_width,
        has_shared_gate=keys.shared_width is not None,
        sigmoid_scale=0.0 if keys.sigmoid_scale is None else number_of(values, keys.sigmoid_scale),
    )


def _of_one_name(
    given: Mapping[str, Any],
    values: Mapping[str, Any],
    names: tuple[str, ...],
    *,
    minimum: int = 1,
    copies: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> tuple[str, int]:
    """A number that has several names, and the name that the file uses.

    Raises:
        ValueError: If names differ, or a copy that transformers does not read.
    """
    used = [name for name in names if name in given] or [names[0]]
    number = int_of(values, used[0], minimum=minimum)
    if any(values[name] != number for name in used):
        raise ValueError(f"{' and '.join(f'{n}={values[n]!r}' for n in used)} differ; keep one")
    for name in copies.get(names[0], ()):
        if given.get(name, number) != number:
            raise ValueError(
                f"{name}={given[name]!r:.80} differs from {used[0]}={number}, which alone is read; "
                f"give {used[0]}"
            )
    return used[0], number


def _clamp(values: Mapping[str, Any], alpha: str, limit: str) -> SwigluClamp:
    return SwigluClamp(alpha=number_of(values, alpha), limit=number_of(values, limit))


def _expert_layers(values: Mapping[str, Any]) -> list[bool]:
    """Every `decoder_sparse_step`-th layer has experts, but not those of `mlp_only_layers`."""
    num_layers, step = int_of(values, "num_hidden_layers"), int_of(values, "decoder_sparse_step")
    dense = values["mlp_only_layers"] or []
    if not isinstance(dense, list) or not all(
        isinstance(i, int) and not isinstance(i, bool) and 0 <= i < num_layers for i in dense
    ):
        raise ValueError(
            f"mlp_only_layers={dense!r:.80} must be a list of layers from 0 to {num_layers - 1}"
        )
    return [(i + 1) % step == 0 and i not in dense for i in range(num_layers)]
