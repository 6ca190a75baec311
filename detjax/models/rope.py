# SPDX-License-Identifier: Apache-2.0
"""Tables of rotary position embedding, computed once on the host.

They enter every layer, so a bit that moved here would move every answer. `pow`, `sin` and `cos` of
a C or vector library change their last bit with the processor (measured 2026-11: numpy's `power`
with AVX-512 switched off, glibc's `cos` without FMA), so none is called: frequencies are decimal
arithmetic, angles are integers, and sine and cosine are sums and products of float64, which
IEEE 754 defines. The tables have the same bits on every host.
"""

import math
from decimal import Decimal, localcontext

import numpy as np

from detjax.models.config import ModelConfig, RopeConfig, RopeKind

PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
DECIMAL_DIGITS = 50
MAX_TABLE_LEN = 2**24  # keeps the error of a phase under 2**-41 turns


def model_rope_tables(config: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    """`rope_tables` of each of `config.ropes`, one beside the other: [S, R * head_dim // 2].

    Raises:
        ValueError: As `rope_tables`.
    """
    sizes = {"head_dim": config.head_dim, "max_len": config.max_position_embeddings}
    tables = [rope_tables(rope, **sizes) for rope in config.ropes]
    if len(tables) == 1:
        return tables[0]
    cos, sin = (np.concatenate(parts, axis=1) for parts in zip(*tables, strict=True))
    return cos, sin


def rope_tables(
    config: RopeConfig, *, head_dim: int, max_len: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine of every position's angles, float32, each `[max_len, head_dim // 2]`.

    `cos[p, c] = factor[p] * (scale * (attention_factor * cos(p * frequency[c])))`, likewise `sin`,
    with `factor[p] = 1 + growth * ln(1 + floor(p / original_max_position))`. Channel `c` is rotated
    with channel `c + head_dim / 2` (Hugging Face's half-split convention). `frequency` is
    `inverse_frequencies(config, head_dim=rotary_dim)`. Pairs from `rotary_dim / 2` on are not
    rotated: `cos = factor[p] * scale`, `sin = 0`.

    Args:
        config: Base and scaling.
        head_dim: Channels of a head; even.
        max_len: Number of positions, from 0.

    Raises:
        ValueError: If `head_dim` is odd or not positive, or `max_len` is not in [1, 2**24].

    Numerics:
        An angle is kept as a fraction of a turn in 64-bit fixed point, so `p * frequency` modulo a
        turn is one integer product, off by at most `p * 2**-65` turns. Sine and cosine of the part
        within an eighth of a turn are Taylor sums to x**17, good to 3e-16; the products with
        `attention_factor`, `scale`, then `factor[p]`, are float64; one rounding to float32.
        `factor[p]` is decimal arithmetic, rounded to float64; without growth it is 1. Against exact
        values: within 0.51 ulp of the float32 result plus `p * 2**-62`. transformers works in
        float32: its cosines are up to 5e-3 off at position 131071.

    Reference:
        Su et al. 2021, arXiv:2104.09864; scaling as in transformers' `modeling_rope_utils`.
    """
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"{head_dim=} must be even and at least 2")
    if not 1 <= max_len <= MAX_TABLE_LEN:
        raise ValueError(
            f"{max_len=} must be in [1, {MAX_TABLE_LEN}]; of a model whose context is longer, say "
            "how much of it is used (max_len of load_model)"
        )
    rotary_dim = config.rotary_dim or head_dim
    with localcontext(prec=DECIMAL_DIGITS):
        turns = [f / (2 * PI) for f in inverse_frequencies(config, head_dim=rotary_dim)]
        steps = np.array([int((t * 2**64).to_integral_value()) % 2**64 for t in turns], np.uint64)
    positions = np.arange(max_len, dtype=np.uint64)
    tables, factors = np.zeros((2, max_len, head_dim // 2), np.float32), _factors(config, max_len)
    tables[0, :, len(steps) :] = (factors * config.scale)[:, None]
    for c, step in enumerate(steps):
        angles = config.scale * (config.attention_factor * _cos_sin(positions * step))
        # ROUND: to float32, the only rounding that shows. Factors of 1 are exact.
        tables[:, :, c] = factors * angles
    return tables[0], tables[1]


def _factors(config: RopeConfig, max_len: int) -> np.ndarray:
    """What multiplies the angles of each position, float64 [max_len]."""
    if not config.growth:
        return np.ones(max_len)
    original = config.original_max_position
    with localcontext(prec=DECIMAL_DIGITS):
        growth = Decimal(config.growth)
        steps = [float(1 + growth * Decimal(1 + n).ln()) for n in range(-(-max_len // original))]
    return np.repeat(steps, original)[:max_len]


def inverse_frequencies(config: RopeConfig, *, head_dim: int) -> list[Decimal]:
    """Radians a position, for each pair of channels, to 50 digits.

    `theta ** (-2c / head_dim)`, then scaled as `config.kind` says:

    - linear: divided by `factor`.
    - llama3: by wavelength; below `original / high_freq_factor` kept, above `original /
      low_freq_factor` divided by `factor`, between them mixed in proportion to the frequency.
    - yarn: kept for channels that turn more than `beta_fast` times in `original` positions,
      divided by `factor` for those that turn less than `beta_slow` times, a ramp over the channels
      between (Peng et al. 2023, arXiv:2309.00071).
    - longrope: each divided by its own of `short_factors` (Ding et al. 2024, arXiv:2402.13753).
    - none: 0.
    """
    with localcontext(prec=DECIMAL_DIGITS):
        theta, factor = Decimal(config.theta), Decimal(config.factor)
        half = head_dim // 2
        plain = [theta ** (-Decimal(2 * c) / head_dim) for c in range(half)]
        match config.kind:
            case RopeKind.DEFAULT:
                return plain
            case RopeKind.LINEAR:
                return [f / factor for f in plain]
            case RopeKind.LONGROPE:
                own = map(Decimal, config.short_factors)
                return [f / divisor for f, divisor in zip(plain, own, strict=True)]
            case RopeKind.NONE:
                return [Decimal(0)] * half
            case RopeKind.LLAMA3:
                kept = [_llama3_kept(f, config) for f in plain]
            case RopeKind.YARN:
                kept = _yarn_kept(config, head_dim=head_dim)
        return [k * f + (1 - k) * f / factor for f, k in zip(plain, kept, strict=True)]


def _llama3_kept(frequency: Decimal, config: RopeConfig) -> Decimal:
    """How much of a frequency stays as it is: 1 for fast ones, 0 for slow ones."""
    low, high = Decimal(config.low_freq_factor), Decimal(config.high_freq_factor)
    turns = config.original_max_position * frequency / (2 * PI)
    return min(max((turns - low) / (high - low), Decimal(0)), Decimal(1))


def _yarn_kept(config: RopeConfig, *, head_dim: int) -> list[Decimal]:
    """How much of each frequency stays as it is: 1 up to channel `low`, 0 from `high` on."""

    def channel_that_turns(num_turns: float) -> Decimal:
        ratio = config.original_max_position / (Decimal(num_turns) * 2 * PI)
        return head_dim * ratio.ln() / (2 * Decimal(config.theta).ln())

    low, high = channel_that_turns(config.beta_fast), channel_that_turns(config.beta_slow)
    if config.truncate:
        low, high = Decimal(math.floor(low)), Decimal(math.ceil(high))
    low, high = max(low, Decimal(0)), min(high, Decimal(head_dim - 1))
    if low == high:
        high += Decimal("0.001")  # as transformers does
    ramp = ((c - low) / (high - low) for c in range(head_dim // 2))
    return [1 - min(max(r, Decimal(0)), Decimal(1)) for r in ramp]


def _cos_sin(phase: np.ndarray) -> np.ndarray:
    """Cosine and sine, stacked, of angles given as uint64 fractions of a turn; float64."""
    quarter = (phase + np.uint64(2**61)) >> np.uint64(62)  # the nearest one; the sum may wrap
    rest = (phase - (quarter << np.uint64(62))).astype(np.int64)  # in [-2**61, 2**61)
    x = rest.astype(np.float64) * (2 * math.pi * 2.0**-64)
    square = x * x
    sin = x * _taylor(square, first=1)
    cos = _taylor(square, first=0)
    is_odd, is_far = quarter & np.uint64(1), quarter >> np.uint64(1)
    turned_cos, turned_sin = np.where(is_odd, -sin, cos), np.where(is_odd, cos, sin)
    sign = np.where(is_far, -1.0, 1.0)
    return np.stack([sign * turned_cos, sign * turned_sin])


def _taylor(square: np.ndarray, *, first: int) -> np.ndarray:
    """`sum((-square)**k / (first + 2k)!)`, k from 0 to 8: cos(x), or sin(x) / x for `first=1`."""
    # ORDER: Horner from k = 8 down; each product and sum is its own numpy call, so never fused.
    total = np.full_like(square, 1 / math.factorial(first + 16))
    for k in range(7, -1, -1):
        total = (-1) ** k / math.factorial(first + 2 * k) + square * total
    return total
