# SPDX-License-Identifier: Apache-2.0
"""Which models have a head of multi-token prediction in their own folder. No JAX."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from detjax.defaults import MTP
from detjax.models.config import ModelConfig
from detjax.models.family import MtpLayout
from detjax.models.heads.config import HeadConfig
from detjax.models.hf_config import decoder_values
from detjax.models.hf_values import read_object
from detjax.models.registry import FAMILIES, find_family


def find_mtp_layout(folder: Path) -> MtpLayout:
    """How a model's folder holds its MTP head.

    Raises:
        ValueError: If its family has no such head, or its `config.json` names none or one that is
            not supported.
    """
    path = folder / "config.json"
    try:
        return mtp_layout_from_hf(read_object(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def mtp_layout_from_hf(values: Mapping[str, Any]) -> MtpLayout:
    """The layout that a parsed `config.json` has; errors as `find_mtp_layout` has them."""
    values = decoder_values(values)
    family = find_family(values.get("architectures"))
    if (layout := family.mtp) is None:
        known = ", ".join(repr(one.name) for one in FAMILIES if one.mtp is not None)
        raise ValueError(
            f"no {family.name!r} has an MTP head that detjax reads; models of these families may "
            f"have one: {known}"
        )
    for key, supported in {layout.count: (1,), **layout.checked}.items():
        value = values.get(key, supported[0])  # where nothing is said, the tensors decide
        if value not in supported or type(value) is not type(supported[0]):
            raise ValueError(
                f"{key}={value!r}: detjax reads an MTP head with {key}={supported[0]!r} only; "
                "draft by another method of speculative_config"
            )
    return layout.behind(values.get("num_hidden_layers", family.defaults["num_hidden_layers"]))


def mtp_config(target: ModelConfig, layout: MtpLayout) -> HeadConfig:
    """What the MTP head of a model is: its layer is like the last one with attention."""
    last = max(i for i in range(target.num_layers) if not target.is_linear(i))
    return HeadConfig(
        method=MTP,
        layer=dataclasses.replace(target.with_layers([last]), linear_attention=None),
        feature_layers=(target.num_layers,),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=target.vocab_size,
        hands_normalised=layout.hands_normalised,
    )
