# SPDX-License-Identifier: Apache-2.0
"""What differs from layer to layer in a `config.json`: windows and rotary embeddings."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from detjax.models.config import LinearAttentionConfig, RopeConfig, RopeKind
from detjax.models.family import Family, RopeRule, WindowRule
from detjax.models.hf_rope import rope_config
from detjax.models.hf_values import flag_of, int_of

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def linear_attention(values: Mapping[str, Any], family: Family) -> LinearAttentionConfig | None:
    """Layers of linear attention, and their sizes; `values` are the file's and defaults.

    Raises:
        ValueError: If a value is not possible; the message names it.
    """
    if not family.has_linear_attention:
        return None
    num_layers, types = int_of(values, "num_hidden_layers"), values.get("layer_types")
    if types is None:
        step = int_of(values, "full_attention_interval")
        types = [FULL if (i + 1) % step == 0 else LINEAR for i in range(num_layers)]
    is_list = isinstance(types, list) and len(types) == num_layers
    if not is_list or any(kind not in (FULL, LINEAR) for kind in types):
        raise ValueError(
            f"layer_types={types!r:.200} must be a list of num_hidden_layers={num_layers} names, "
            f"each {FULL!r} or {LINEAR!r}"
        )
    if FULL not in types or LINEAR not in types:
        raise ValueError(
            f"layer_types={types!r:.200} has one kind of layer; {family.name!r} is supported with "
            f"both {FULL!r} and {LINEAR!r}"
        )
    names = "key_heads", "value_heads"
    num_keys, num_values = (int_of(values, f"linear_num_{name}") for name in names)
    if num_values % num_keys:
        raise ValueError(
            f"linear_num_value_heads={num_values} must be a multiple of "
            f"linear_num_key_heads={num_keys}; correct the file"
        )
    return LinearAttentionConfig(
        num_key_heads=num_keys,
        num_value_heads=num_values,
        key_dim=int_of(values, "linear_key_head_dim"),
        value_dim=int_of(values, "linear_value_head_dim"),
        conv_width=int_of(values, "linear_conv_kernel_dim"),
        layers=tuple(kind == LINEAR for kind in types),
    )


def sliding_windows(values: Mapping[str, Any], family: Family) -> tuple[int | None, ...]:
    """Window of every layer: key j is visible to query i if i - window < j <= i."""
    num_layers, rule = int_of(values, "num_hidden_layers"), family.windows
    window, has_windows = None, rule is not WindowRule.NEVER
    if rule is WindowRule.BY_LAYER:
        has_windows = flag_of(values, "use_sliding_window")
    if has_windows and values["sliding_window"] is not None:
        window = int_of(values, "sliding_window")
    first_sliding = 0
    if rule is WindowRule.BY_LAYER:
        first_sliding = int_of(values, "max_window_layers", minimum=0)
    is_sliding = [window is not None and i >= first_sliding for i in range(num_layers)]
    types = values.get("layer_types")
    if rule is WindowRule.BY_PATTERN and window is not None and types is None:
        step = family.window_step or int_of(values, "sliding_window_pattern")
        is_sliding = [(i + 1) % step != 0 for i in range(num_layers)]
    if types is not None:
        derived = [SLIDING if sliding else FULL for sliding in is_sliding]
        has_choice = rule in (WindowRule.BY_LAYER, WindowRule.BY_PATTERN)
        _check_layer_types(types, derived, is_free=has_choice and window is not None)
        is_sliding = [kind == SLIDING for kind in types]
    return tuple(window if sliding else None for sliding in is_sliding)


def layer_ropes(
    values: Mapping[str, Any],
    family: Family,
    *,
    windows: tuple[int | None, ...],
    head_dim: int,
    max_len: int,
) -> tuple[tuple[RopeConfig, ...], tuple[int, ...]]:
    """The rotary embeddings of a model, and which of them each layer has (`ModelConfig`).

    Where each layer has the first, a second is that of queries.

    Args:
        values: The parsed `config.json`.
        family: Of the model.
        windows: Of each layer.
        head_dim: Channels of a head.
        max_len: The context that the file names.

    Raises:
        ValueError: If a key is not possible or not supported; the message names it.
    """

    def read(keys: Mapping[str, Any], default_theta: float) -> RopeConfig:
        rope = rope_config(
            keys, default_theta=default_theta, max_len=max_len, head_dim=head_dim,
            family=family,
        )  # fmt: skip
        return dataclasses.replace(rope, is_interleaved=family.is_interleaved)

    if family.default_rope and not any(map(values.get, ("rope_scaling", "rope_parameters"))):
        values = {**values, "rope_parameters": dict(family.default_rope)}
    theta = family.defaults["rope_theta"]
    match family.ropes:
        case RopeRule.ONE:
            of_queries = read(values, theta)
            of_keys = dataclasses.replace(of_queries, growth=0.0)
            return ((of_keys, of_queries) if of_queries.growth else (of_keys,)), ()
        case RopeRule.BY_WINDOW:
            full, sliding = _by_window(values, family)
            local_theta = family.defaults.get("rope_local_base_freq", theta)
            ropes = read(full, theta), read(sliding, local_theta)
            return _used(ropes, [int(window is not None) for window in windows])
        case RopeRule.WINDOWS_ALONE:
            # WHY: transformers asks for the key: with it layers are full or rotated, never both.
            has_windows = {**family.defaults, **values}["sliding_window"] is not None
            has_none = [window is None and has_windows for window in windows]
        case RopeRule.SOME_LAYERS:
            has_none = _without_rope(values, family, num_layers=len(windows))
    rope = read(values, theta)
    none = RopeConfig(theta=rope.theta, kind=RopeKind.NONE)
    return _used((rope, none), [int(none) for none in has_none])


def _used(
    ropes: tuple[RopeConfig, RopeConfig], of_layer: list[int]
) -> tuple[tuple[RopeConfig, ...], tuple[int, ...]]:
    """Leave out a second one that no layer has, or that is the first."""
    if ropes[0] == ropes[1] or not any(of_layer):
        return ropes[:1], ()
    return ropes, tuple(of_layer)


def _by_window(
    values: Mapping[str, Any], family: Family
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The keys of layers without a window, and of those with one, as `rope_config` reads them."""
    nested = values.get("rope_parameters")
    if nested is None:
        own = "rope_local_base_freq" if "rope_local_base_freq" in family.defaults else "rope_theta"
        return values, {"rope_theta": values.get(own)}
    if not isinstance(nested, dict) or nested.keys() != {FULL, SLIDING}:
        raise ValueError(f"rope_parameters={nested!r:.80} must have {FULL!r} and {SLIDING!r}")
    full, sliding = ({"rope_parameters": nested[kind]} for kind in (FULL, SLIDING))
    return {"rope_theta": values.get("rope_theta"), **full}, sliding


def _without_rope(values: Mapping[str, Any], family: Family, *, num_layers: int) -> list[bool]:
    """`no_rope_layers` has 0 for a layer that is not rotated; by default every n-th is not."""
    listed = values.get("no_rope_layers")
    if listed is None:
        step = int_of({**family.defaults, **values}, "no_rope_layer_interval")
        return [(i + 1) % step == 0 for i in range(num_layers)]
    if (
        not isinstance(listed, list)
        or len(listed) < num_layers
        or any(has_rope not in (0, 1) for has_rope in listed)
    ):
        raise ValueError(
            f"no_rope_layers={listed!r:.80} must be a list of 0 and 1, one for each of "
            f"{num_layers} layers"
        )
    return [not has_rope for has_rope in listed[:num_layers]]


def _check_layer_types(types: Any, derived: list[str], *, is_free: bool) -> None:
    """`layer_types` may choose only where a window is given and the family lets layers differ."""
    if not isinstance(types, list) or len(types) != len(derived):
        raise ValueError(
            f"layer_types={types!r} must be a list of num_hidden_layers={len(derived)} names"
        )
    for i, (kind, expected) in enumerate(zip(types, derived, strict=True)):
        if kind not in (FULL, SLIDING):
            raise ValueError(
                f"layer_types[{i}]={kind!r} is not supported; detjax has {FULL!r} and {SLIDING!r}"
            )
        if kind != expected and not is_free:
            raise ValueError(
                f"layer_types[{i}]={kind!r} contradicts the other keys, by which the layer is "
                f"{expected!r}; correct layer_types, use_sliding_window or sliding_window"
            )
