# SPDX-License-Identifier: Apache-2.0
"""The mesh, and what does not fit on it."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from detjax.models.hf_config import config_from_hf
from detjax.models.loading import random_model
from detjax.models.params import num_params
from detjax.numerics import NumericsProfile
from detjax.opening import load_on_devices
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.backend_choice import MAX_UNASKED_CPU_PARAMS, choose_backend
from detjax.parallel.collectives import butterfly_sum
from detjax.parallel.mesh import configure_virtual_devices, make_mesh
from detjax.testing.dummies import dummy_config, dummy_model

SHAPE_8B = Path(__file__).parents[2] / "benchmarks" / "shapes" / "llama3_8b.json"


def test_mesh_has_the_shape_asked_for():
    assert dict(make_mesh(2, 4).shape) == {"dp": 2, "tp": 4}


@pytest.mark.parametrize(
    ("dp", "tp", "message"),
    [
        (0, 1, "dp=0 and tp=1 must be at least 1"),
        (1, 3, "tp=3 must be a power of two"),
        (4, 4, "needs 16 devices, there are 8"),
    ],
)
def test_impossible_meshes_are_refused(dp, tp, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(dp, tp)


def test_too_late_for_more_devices():
    make_mesh(1, 8)
    configure_virtual_devices(8)
    with pytest.raises(ValueError, match="JAX has already started with 8"):
        configure_virtual_devices(16)


def test_a_machine_with_gpus_needs_no_virtual_devices(monkeypatch):
    """A notebook may look at its devices before it asks for a mesh of two."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    configure_virtual_devices(16)
    assert len(jax.devices("cpu")) < 16
    with pytest.raises(ValueError, match="needs 16 devices"):
        make_mesh(1, 16, platform="cpu")


@pytest.mark.parametrize(
    ("config", "profile", "tp", "message"),
    [
        (dummy_config(intermediate_size=176), NumericsProfile(), 2, "leaves of down_proj"),
        (
            dummy_config(),
            NumericsProfile(num_leaves=2),
            4,
            "divide the 2 leaves of o_proj",
        ),
        (dummy_config(num_heads=6, num_kv_heads=6), NumericsProfile(), 4, "num_heads=6"),
    ],
)
def test_ranks_must_own_whole_leaves_and_heads(config, profile, tp, message):
    with pytest.raises(ValueError, match=message):
        dummy_model(config, tp=tp, profile=profile)


def test_butterfly_needs_a_power_of_two():
    with pytest.raises(ValueError, match="axis_size=3 must be a power of two"):
        butterfly_sum(jnp.zeros((1, 1)), "tp", 3, backend=Backend.PORTABLE)


def test_mesh_must_be_of_the_backends_devices():
    profile, mesh = NumericsProfile(), make_mesh(1, 1)
    with pytest.raises(ValueError, match="backend sm90 runs on gpu devices and the mesh has cpu"):
        random_model(dummy_config(), seed=0, profile=profile, mesh=mesh, backend=Backend.SM90)


def test_backends_that_cannot_run_here_are_refused():
    choice = choose_backend(None)
    assert choice.backend is Backend.REFERENCE and choice.reason
    with pytest.raises(ValueError, match="--backend sm90 cannot run here") as told:
        choose_backend(Backend.SM90)
    same, other = "--backend reference can, and gives the same bits", "--backend portable can"
    assert same in str(told.value) and f"{other}, and gives other bits" in str(told.value)
    # What refuses the model as well is not offered.
    refused = {Backend.REFERENCE: "it is made up"}
    with pytest.raises(ValueError, match="--backend sm90 cannot run here") as told:
        choose_backend(Backend.SM90, why_not_model=refused.get)
    assert other in str(told.value) and "reference" not in str(told.value)


def test_a_large_model_runs_on_the_cpu_only_if_asked(tmp_path, monkeypatch):
    """As on an A100, which no kernel here knows: an 8B model must not fall back in silence."""
    other = "NVIDIA A100-SXM4-80GB is not a Hopper GPU (sm_90)"
    monkeypatch.setattr("detjax.pallas_kernels.sm90.why_not_here", lambda: other)
    (tmp_path / "config.json").write_text(SHAPE_8B.read_text())
    options = {"profile": NumericsProfile(), "dp": 1, "tp": 1}
    with pytest.raises(
        ValueError, match="8.0 billion.*A100.*ask for the CPU with --backend reference"
    ):
        load_on_devices(tmp_path, backend="auto", **options)
    # With the backend named, loading goes on, to the weights that this folder lacks.
    with pytest.raises(FileNotFoundError, match="safetensors"):
        load_on_devices(tmp_path, backend="portable", **options)
    assert other in choose_backend(num_params=MAX_UNASKED_CPU_PARAMS).reason


def test_parameters_are_counted_from_the_configuration():
    assert num_params(config_from_hf(json.loads(SHAPE_8B.read_text()))) == 8_030_261_248
    config = dummy_config(vocab_size=320, hidden_size=64)
    tied = dataclasses.replace(config, tie_word_embeddings=True)
    untied = dataclasses.replace(config, tie_word_embeddings=False)
    assert num_params(untied) - num_params(tied) == 320 * 64
