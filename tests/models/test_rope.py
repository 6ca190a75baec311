# SPDX-License-Identifier: Apache-2.0
"""Rotary tables agree with exact values, with transformers, and with themselves on every host."""

import dataclasses
import hashlib
import json
from decimal import Decimal, localcontext
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from detjax.models.config import RopeConfig, RopeKind
from detjax.models.hf_config import config_from_hf, load_config
from detjax.models.loading import place_model
from detjax.models.rope import (
    DECIMAL_DIGITS,
    PI,
    inverse_frequencies,
    model_rope_tables,
    rope_tables,
)
from detjax.models.weights.random_weights import random_params
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh
from detjax.testing import assert_bitwise_equal
from detjax.testing.dummies import dummy_config, dummy_model

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = sorted(folder.name for folder in (GOLDEN / "hf").iterdir() if folder.is_dir())
PUBLISHED = json.loads((GOLDEN / "rope_published.json").read_text())


def published_rope(name: str) -> tuple[RopeConfig, int]:
    facts = PUBLISHED["ropes"][name]
    values = {key: facts[key] for key in ("head_dim", "max_position_embeddings", "rope_parameters")}
    config = config_from_hf({"architectures": ["LlamaForCausalLM"], **values})
    return config.rope, config.head_dim


def error_in_ulp(actual: np.ndarray, exact: np.ndarray) -> float:
    """Largest distance from float64 values, in ulp of float32."""
    ulp = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    return float((np.abs(actual.astype(np.float64) - exact) / ulp).max())


@pytest.mark.parametrize("case", CASES)
def test_tables_of_golden_folders_are_within_half_an_ulp_of_transformers_in_float64(case):
    config = load_config(GOLDEN / "hf" / case)
    expected = load_file(GOLDEN / "hf" / case / "expected.safetensors")
    facts = json.loads((GOLDEN / "hf" / case / "expected.json").read_text())
    positions = facts["rope"]["positions"]
    half, num_rows = config.head_dim // 2, max(positions) + 1
    tables = model_rope_tables(dataclasses.replace(config, max_position_embeddings=num_rows))
    for name, column in (("rope", 0), ("rope_window", half)):
        if f"{name}.cos_float64" not in expected:
            continue
        rotated = expected[f"{name}.cos_float64"].shape[1]
        scale = config.rope.scale
        for table, which, otherwise in zip(tables, ("cos", "sin"), (scale, 0), strict=True):
            assert table.dtype == np.float32
            assert table.shape == (num_rows, len(config.ropes) * half)
            exact = scale * expected[f"{name}.{which}_float64"]
            own = table[positions, column : column + half]
            assert error_in_ulp(own[:, :rotated], exact) <= 0.51
            assert (own[:, rotated:] == np.float32(otherwise)).all()


@pytest.mark.parametrize("case", ["smollm3", "exaone4"])
def test_layers_without_rotary_embedding_have_cosines_of_one_and_sines_of_zero(case):
    config = load_config(GOLDEN / "hf" / case)
    cos, sin = model_rope_tables(config)
    half = config.head_dim // 2
    assert (cos[:, half:] == 1).all() and (sin[:, half:] == 0).all()
    rotated = {"smollm3": (0, 1, 0, 1), "exaone4": (0, 0, 0, 1)}[case]
    assert config.layer_ropes == rotated, "of the second table where it is 1"


@pytest.mark.parametrize("name", sorted(PUBLISHED["ropes"]))
def test_published_shapes_are_within_half_an_ulp_of_transformers_in_float64(name):
    rope, head_dim = published_rope(name)
    expected = load_file(GOLDEN / "rope_published.safetensors")
    positions = [p for p in PUBLISHED["positions"] if p <= 32767]
    cos, sin = rope_tables(rope, head_dim=head_dim, max_len=32768)
    for table, key in ((cos, "cos"), (sin, "sin")):
        reference = expected[f"{name}.{key}_float64"][: len(positions)]
        assert error_in_ulp(table[positions], reference) <= 0.51


@pytest.mark.parametrize("name", sorted(PUBLISHED["ropes"]))
def test_inverse_frequencies_are_those_of_transformers_in_float64(name):
    rope, head_dim = published_rope(name)
    expected = load_file(GOLDEN / "rope_published.safetensors")[f"{name}.inv_freq_float64"]
    actual = np.array([float(f) for f in inverse_frequencies(rope, head_dim=head_dim)])
    # transformers rounds 1 - (1 - ramp) in float64: a few ulp where the ramp is small
    assert float(np.max(np.abs(actual / expected - 1))) <= 5e-15


def decimal_cos_sin(angle: Decimal) -> tuple[float, float]:
    """Taylor sums to 40 digits, after reduction to one turn."""
    with localcontext(prec=DECIMAL_DIGITS):
        angle = angle % (2 * PI)
        cos, sin, term = Decimal(0), Decimal(0), Decimal(1)
        for k in range(0, 120, 2):
            sign = 1 if k % 4 == 0 else -1
            cos += sign * term
            sin += sign * term * angle / (k + 1)
            term = term * angle * angle / ((k + 1) * (k + 2))
        return float(cos), float(sin)


@pytest.mark.parametrize("name", ["llama31_8b", "qwen25_7b_yarn4"])
def test_tables_are_within_half_an_ulp_of_exact_values_up_to_position_131071(name):
    rope, head_dim = published_rope(name)
    positions = [0, 1, 2, 3, 511, 4096, 8191, 40959, 65536, 131071]
    channels = [0, 1, 7, 20, 31, 40, 63]
    cos, sin = rope_tables(rope, head_dim=head_dim, max_len=131072)
    with localcontext(prec=DECIMAL_DIGITS):
        angles = inverse_frequencies(rope, head_dim=head_dim)
        exact = np.array([[decimal_cos_sin(p * angles[c]) for c in channels] for p in positions])
    exact *= rope.attention_factor
    assert error_in_ulp(cos[np.ix_(positions, channels)], exact[..., 0]) <= 0.51
    assert error_in_ulp(sin[np.ix_(positions, channels)], exact[..., 1]) <= 0.51


@pytest.mark.parametrize("context", [40960, 131072])
def test_what_qwen3_recommends_for_131072_tokens_has_the_tables_that_are_checked(context):
    """Its model card: `rope_scaling` beside `rope_theta`, in the form of older releases."""
    values = {
        "architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "rope_theta": 1000000,
        "max_position_embeddings": context,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768,
        },
    }  # fmt: skip
    config = config_from_hf(values)
    assert (config.rope, config.head_dim) == published_rope("qwen25_7b_yarn4")


@pytest.mark.control
def test_control_float32_angles_are_thousands_of_ulp_off():
    rope, head_dim = published_rope("llama31_8b")
    cos, _ = rope_tables(rope, head_dim=head_dim, max_len=131072)
    frequencies = np.array(
        [float(f) for f in inverse_frequencies(rope, head_dim=head_dim)], np.float32
    )
    in_float32 = np.cos(np.float32(131071) * frequencies)
    assert error_in_ulp(in_float32, cos[-1].astype(np.float64)) > 1000


@pytest.mark.slow
def test_a_model_makes_tables_for_what_is_used_of_its_context():
    """A context of 10**12 would take for ever; the positions that are used keep their bits."""
    absurd, mesh = dummy_config(num_layers=1, max_len=10**12), make_mesh(1, 1)
    short = place_model(
        absurd, lambda: random_params(absurd, mesh, seed=0, dtype="bfloat16", vocab_block=128),
        profile=NumericsProfile(), mesh=mesh, backend=Backend.PORTABLE, folder=None, max_len=300,
    )  # fmt: skip
    assert short.config.max_position_embeddings == 300
    whole = rope_tables(absurd.rope, head_dim=absurd.head_dim, max_len=1024)
    for a, b in zip(short.rope_tables, whole, strict=True):
        assert_bitwise_equal(a, b[:300], claim="the first 300 positions")
    with pytest.raises(ValueError, match="say how much of it is used"):
        dummy_model(absurd)


def test_tables_do_not_depend_on_their_length():
    rope, head_dim = published_rope("qwen25_7b_yarn4")
    short = rope_tables(rope, head_dim=head_dim, max_len=17)
    long = rope_tables(rope, head_dim=head_dim, max_len=4099)
    for a, b in zip(short, long, strict=True):
        assert a.tobytes() == b[:17].tobytes()


SHA256 = {
    "llama2_7b": "e85cd5989c173ce1",
    "llama31_8b": "26f22c42b7ae8368",
    "llama2_7b_linear4": "dc48080e602d7906",
    "qwen25_7b_yarn4": "bd4a4a4693b23b5f",
    "yarn32_untruncated": "911be301a0a1967d",
}


@pytest.mark.parametrize("name", sorted(SHA256))
def test_tables_have_the_same_bits_on_every_host(name):
    rope, head_dim = published_rope(name)
    hasher = hashlib.sha256()
    for table in rope_tables(rope, head_dim=head_dim, max_len=8192):
        hasher.update(np.ascontiguousarray(table, "<f4").tobytes())
    assert hasher.hexdigest()[:16] == SHA256[name]


def test_position_0_is_the_attention_factor_and_0():
    rope = RopeConfig(
        theta=10000.0,
        kind=RopeKind.YARN,
        factor=4.0,
        original_max_position=64,
        beta_fast=32.0,
        beta_slow=1.0,
        attention_factor=1.25,
    )
    cos, sin = rope_tables(rope, head_dim=8, max_len=1)
    assert (cos == np.float32(1.25)).all()
    assert (sin == 0).all()


@pytest.mark.parametrize(
    ("head_dim", "max_len", "message"),
    [
        (7, 16, "head_dim=7 must be even"),
        (0, 16, "head_dim=0 must be even and at least 2"),
        (8, 0, r"max_len=0 must be in \[1, 16777216\]"),
        (8, 2**24 + 1, r"max_len=16777217 must be in \[1, 16777216\]"),
    ],
)
def test_bad_sizes_are_refused(head_dim, max_len, message):
    with pytest.raises(ValueError, match=message):
        rope_tables(RopeConfig(theta=10000.0), head_dim=head_dim, max_len=max_len)
