# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings of a `config.json`, as transformers' `modeling_rope_utils` reads them."""

import dataclasses
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from detjax.models.config import RopeConfig, RopeKind
from detjax.models.family import Family
from detjax.models.hf_values import flag_of, int_of, number_of

ROPE_PARAMETERS: Mapping[RopeKind, frozenset[str]] = {
    RopeKind.DEFAULT: frozenset(),
    RopeKind.LINEAR: frozenset({"factor"}),
    RopeKind.LLAMA3: frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    RopeKind.YARN: frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "finetuned",  # of its training, and read by nobody
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
    RopeKind.LONGROPE: frozenset(
        {"factor", "short_factor", "long_factor", "attention_factor"}
        | {"original_max_position_embeddings"}
    ),
}
"""What each kind of rotary scaling reads, beside its type, base and partial factor."""

OLDER_NAMES = {"su": RopeKind.LONGROPE.value}
MAX_FACTORS = 4096
QUERY_GROWTH = "llama_4_scaling_beta"


def rope_config(
    values: Mapping[str, Any],
    *,
    default_theta: float,
    max_len: int,
    head_dim: int,
    family: Family,
) -> RopeConfig:
    """Read rotary parameters as transformers' `modeling_rope_utils` does.

    Args:
        values: The parsed `config.json`.
        default_theta: Where the file has no base.
        max_len: The context that the file names.
        head_dim: Channels of a head.
        family: Of the model. Only one with a key for the original context has longrope.
    """
    given, source = _rope_parameters(values)
    top_theta, nested_theta = values.get("rope_theta"), given.pop("rope_theta", None)
    if top_theta is not None and nested_theta is not None and top_theta != nested_theta:
        raise ValueError(
            f"rope_theta={top_theta!r} contradicts the {nested_theta!r} in {source}; keep one"
        )
    theta = next(t for t in (nested_theta, top_theta, default_theta) if t is not None)
    old_name, new_name = given.pop("type", None), given.pop("rope_type", None)
    if old_name is not None and new_name is not None and old_name != new_name:
        raise ValueError(f"{source} has type={old_name!r} and rope_type={new_name!r}; keep one")
    name = new_name or old_name or "default"
    if isinstance(name, str):
        name = OLDER_NAMES.get(name, name)
    has_longrope = "original_max_position_embeddings" in family.defaults
    kinds = [k.value for k in ROPE_PARAMETERS if has_longrope or k is not RopeKind.LONGROPE]
    if name not in kinds:  # a list, as it need not be hashable
        raise ValueError(
            f"{source} asks for rope_type={name!r}, which is not supported; detjax has "
            f"{', '.join(kinds)} for {family.name!r}"
        )
    rotary_dim = _rotary_dim(values, given, partial=family.partial_rotary, head_dim=head_dim)
    if name == RopeKind.LONGROPE.value and "original_max_position_embeddings" not in given:
        given["original_max_position_embeddings"] = values.get(
            "original_max_position_embeddings", max_len
        )
    for key in family.rope_inert:
        given.pop(key, None)
    growth = 0.0
    if family.scales_queries:
        growth = _query_growth(given, name, max_len=max_len, source=source)
    for key, value in given.items():
        if key not in ROPE_PARAMETERS[RopeKind(name)]:
            raise ValueError(
                f"{source}[{key!r}]={value!r} is not read by rope_type={name!r}; remove it, or "
                "correct rope_type"
            )
    theta = number_of({"rope_theta": theta}, "rope_theta")
    rope = _scaled_rope(RopeKind(name), given, theta=theta, max_len=max_len, source=source)
    if rope.short_factors and len(rope.short_factors) != (rotary_dim or head_dim) // 2:
        raise ValueError(
            f"{source}['short_factor'] has {len(rope.short_factors)} numbers, and the rotated "
            f"channels of a head make {(rotary_dim or head_dim) // 2} pairs; correct the file"
        )
    return dataclasses.replace(rope, rotary_dim=rotary_dim, growth=growth)


def _query_growth(given: dict[str, Any], name: str, *, max_len: int, source: str) -> float:
    """How fast the scale of queries grows with their position; takes the key out of `given`."""
    if QUERY_GROWTH not in given or name != RopeKind.YARN.value:
        raise ValueError(
            f"{source} with rope_type={name!r} and {QUERY_GROWTH}={given.get(QUERY_GROWTH)!r} is "
            "not supported; queries are scaled by position with rope_type='yarn' and a number as "
            f"{QUERY_GROWTH}"
        )
    original = int_of(
        {"original_max_position_embeddings": max_len, **given}, "original_max_position_embeddings"
    )
    if max_len > MAX_FACTORS * original:
        raise ValueError(
            f"original_max_position_embeddings={original} must be at least a {MAX_FACTORS}th of "
            f"max_position_embeddings={max_len}, as each run of so many positions has a scale of "
            "its own; correct the file"
        )
    return number_of({QUERY_GROWTH: given.pop(QUERY_GROWTH)}, QUERY_GROWTH, minimum=0.0)


def _rotary_dim(
    values: Mapping[str, Any], given: dict[str, Any], *, partial: float | None, head_dim: int
) -> int:
    """Channels of a head that are rotated, 0 for all; takes the key out of `given`."""
    shares = [given.pop("partial_rotary_factor", None), values.get("partial_rotary_factor")]
    shares = [share for share in shares if share is not None]
    if any(share != shares[0] for share in shares):
        raise ValueError(f"two values of partial_rotary_factor, {shares}; keep one")
    share = shares[0] if shares else 1 if partial is None else partial
    if share == 1:
        return 0
    if partial is None:
        raise ValueError(f"partial_rotary_factor={share!r} is not supported; detjax rotates all")
    rotary_dim = int(
        head_dim * number_of({"partial_rotary_factor": share}, "partial_rotary_factor")
    )
    if rotary_dim % 2 or not 2 <= rotary_dim < head_dim:
        raise ValueError(
            f"partial_rotary_factor={share!r} rotates {rotary_dim} of {head_dim=} channels; it "
            "must rotate an even number of them, and at least 2"
        )
    return rotary_dim


def _rope_parameters(values: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The dict of rotary parameters, without nulls, and the key it stands under."""
    filled = [key for key in ("rope_scaling", "rope_parameters") if values.get(key)]
    if len(filled) == 2:
        raise ValueError("both rope_scaling and rope_parameters are given; keep one")
    source = filled[0] if filled else "rope_parameters"
    given = values.get(source) or {}
    if not isinstance(given, dict):
        raise ValueError(f"{source}={given!r} must be an object or null")
    # transformers reads an absent truncate as true but null as false, so null is left to be refused
    return {k: v for k, v in given.items() if v is not None or k == "truncate"}, source


def _scaled_rope(
    kind: RopeKind, given: Mapping[str, Any], *, theta: float, max_len: int, source: str
) -> RopeConfig:
    """Fill in what one kind leaves out, in transformers' way."""
    if kind is RopeKind.DEFAULT:
        return RopeConfig(theta=theta)
    original = 0
    if kind is not RopeKind.LINEAR:
        given = {"original_max_position_embeddings": max_len, **given}
        original = int_of(given, "original_max_position_embeddings")
    if kind is RopeKind.YARN:
        return _yarn_rope(
            {
                "factor": max_len / original,
                "beta_fast": 32,
                "beta_slow": 1,
                "truncate": True,
                **given,
            },
            theta=theta,
        )
    if kind is RopeKind.LONGROPE:
        return _longrope(given, theta=theta, max_len=max_len, source=source)
    required = ROPE_PARAMETERS[kind]
    if missing := sorted(required - given.keys()):
        raise ValueError(f"{source} of rope_type={kind.value!r} lacks {', '.join(missing)}")
    factor = number_of(given, "factor", minimum=1.0)
    if kind is RopeKind.LINEAR:
        return RopeConfig(theta=theta, kind=kind, factor=factor)
    low, high = number_of(given, "low_freq_factor"), number_of(given, "high_freq_factor")
    if high <= low:
        raise ValueError(f"high_freq_factor={high} must be above low_freq_factor={low}")
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_position=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def scaled_context(rope: RopeConfig, max_len: int) -> int:
    """Tokens that a model of this context takes with this scaling.

    Yarn makes a model for more tokens: who adds it to a file need not raise its context. Of
    longrope the factors of short texts are computed, so the context is the original one.
    """
    if rope.kind is RopeKind.LONGROPE:
        return min(max_len, rope.original_max_position)
    if rope.kind is not RopeKind.YARN:
        return max_len
    context = {"max_position_embeddings": int(rope.factor * rope.original_max_position)}
    return max(max_len, int_of(context, "max_position_embeddings"))


def _longrope(given: Mapping[str, Any], *, theta: float, max_len: int, source: str) -> RopeConfig:
    """The factors of texts up to the original context; those of longer ones are checked alone."""
    original = int_of(given, "original_max_position_embeddings", minimum=2)
    for key in ("short_factor", "long_factor"):
        factors = given.get(key)
        if not isinstance(factors, list) or len(factors) > MAX_FACTORS:
            raise ValueError(f"{source}[{key!r}]={factors!r:.80} must be a list of numbers")
    short = tuple(number_of({"short_factor": f}, "short_factor") for f in given["short_factor"])
    factor = number_of({"factor": max_len / original, **given}, "factor")
    attention_factor = 1.0
    if "attention_factor" in given:
        attention_factor = number_of(given, "attention_factor")
    elif factor > 1:
        # By decimal: the same on every machine.
        attention_factor = float((1 + Decimal(factor).ln() / Decimal(original).ln()).sqrt())
    return RopeConfig(
        theta=theta,
        kind=RopeKind.LONGROPE,
        original_max_position=original,
        attention_factor=attention_factor,
        short_factors=short,
    )


def _yarn_rope(given: Mapping[str, Any], *, theta: float) -> RopeConfig:
    factor = number_of(given, "factor", minimum=1.0)
    beta_fast, beta_slow = number_of(given, "beta_fast"), number_of(given, "beta_slow")
    if beta_fast < beta_slow:
        raise ValueError(f"{beta_fast=} must not be below {beta_slow=}")
    if theta <= 1:
        raise ValueError(f"rope_theta={theta} must be above 1 for rope_type='yarn'")
    if "attention_factor" in given:
        attention_factor = number_of(given, "attention_factor")
    else:
        mscales = {"mscale": 0, "mscale_all_dim": 0, **given}
        mscale = number_of(mscales, "mscale", minimum=0.0)
        mscale_all_dim = number_of(mscales, "mscale_all_dim", minimum=0.0)
        if mscale and mscale_all_dim:
            attention_factor = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
        else:
            attention_factor = _yarn_mscale(factor, 1.0)
    return RopeConfig(
        theta=theta,
        kind=RopeKind.YARN,
        factor=factor,
        original_max_position=int_of(given, "original_max_position_embeddings"),
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        attention_factor=attention_factor,
        truncate=flag_of(given, "truncate"),
    )


def _yarn_mscale(scale: float, mscale: float) -> float:
    """`0.1 * mscale * ln(scale) + 1`, the logarithm by decimal: the same on every machine."""
    return 0.1 * mscale * float(Decimal(scale).ln()) + 1.0
