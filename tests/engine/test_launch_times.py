# SPDX-License-Identifier: Apache-2.0
"""How many tokens a launch decodes follows what was measured of small and large models."""

import dataclasses

import pytest

from detjax.engine.running.launch_times import SEVERAL, quickest_decode_steps, quickest_steps_ahead
from detjax.models.abstract import abstract_params
from detjax.models.config import ModelConfig
from detjax.models.loading import LoadedModel
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.testing.dummies import dummy_config, dummy_model


def of_shape(**sizes) -> ModelConfig:
    return dataclasses.replace(
        dummy_config(), vocab_size=32768, num_heads=8, num_kv_heads=8, head_dim=128, **sizes
    )


SMALL = {"num_layers": 24, "hidden_size": 1024, "intermediate_size": 4096}
LARGE = {"num_layers": 32, "hidden_size": 4096, "intermediate_size": 14336}


def of_sizes(sizes: dict[str, int], backend: Backend) -> LoadedModel:
    made = dummy_model(dummy_config(num_layers=1))
    config = of_shape(sliding_windows=(None,) * sizes["num_layers"], **sizes)
    params = abstract_params(config, made.mesh, profile=NumericsProfile())
    return dataclasses.replace(made, config=config, params=params, backend=backend)


@pytest.mark.quick_cases("sizes1-Backend.SM90-1024-512-1")
@pytest.mark.parametrize(
    ("sizes", "backend", "batch_size", "max_tokens", "steps"),
    [
        (SMALL, Backend.SM90, 16, 512, SEVERAL),
        (SMALL, Backend.SM90, 1024, 512, 1),  # the device is the limit
        (SMALL, Backend.SM90, 16, 8, 1),  # most would lie behind an end
        (SMALL, Backend.PORTABLE, 16, 512, 1),
        (LARGE, Backend.SM90, 1, 512, 1),
    ],
)
def test_several_tokens_a_launch_where_the_host_is_the_limit(
    sizes, backend, batch_size, max_tokens, steps
):
    model = of_sizes(sizes, backend)
    assert quickest_decode_steps(model, batch_size=batch_size, max_tokens=max_tokens) == steps


@pytest.mark.quick_cases("sizes3-Backend.SM90-1-1")
@pytest.mark.parametrize(
    ("sizes", "backend", "decode_steps", "ahead"),
    [
        (SMALL, Backend.SM90, 1, 2),
        (SMALL, Backend.SM90, SEVERAL, 1),  # a launch takes longer than its results
        (SMALL, Backend.PORTABLE, 1, 1),
        (LARGE, Backend.SM90, 1, 1),
    ],
)
def test_a_step_more_ahead_where_results_take_longer_than_a_step(
    sizes, backend, decode_steps, ahead
):
    assert quickest_steps_ahead(of_sizes(sizes, backend), decode_steps=decode_steps) == ahead
