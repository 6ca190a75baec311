# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings of a `config.json`, as transformers' `modeling_rope_utils` reads them."""

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from detjax.models.config import RopeConfig, RopeKind
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
}
"""What each kind of rotary scaling reads, beside its type, base and partial factor."""


def rope_config(values: Mapping[str, Any], *, default_theta: float, max_len: int) -> RopeConfig:
    """Read rotary parameters as transformers' `modeling_rope_utils` does."""
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
    if name not in [kind.value for kind in RopeKind]:  # a list, as it need not be hashable
        raise ValueError(
            f"{source} asks for rope_type={name!r}, which is not supported; detjax has "
            f"{', '.join(kind.value for kind in RopeKind)}"
        )
    partial = given.pop("partial_rotary_factor", 1)
    if partial != 1:
        raise ValueError(f"partial_rotary_factor={partial!r} is not supported; detjax rotates all")
    for key, value in given.items():
        if key not in ROPE_PARAMETERS[RopeKind(name)]:
            raise ValueError(
                f"{source}[{key!r}]={value!r} is not read by rope_type={name!r}; remove it, or "
                "correct rope_type"
            )
    theta = number_of({"rope_theta": theta}, "rope_theta")
    return _scaled_rope(RopeKind(name), given, theta=theta, max_len=max_len, source=source)


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


def scaled_context(rope: RopeConfig) -> int:
    """Tokens for which yarn makes a model: who adds it to a file need not raise its context."""
    if rope.kind is not RopeKind.YARN:
        return 0
    context = {"max_position_embeddings": int(rope.factor * rope.original_max_position)}
    return int_of(context, "max_position_embeddings")


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
