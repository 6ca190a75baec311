# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct, where `examples/smollm2.py` has put it; tests skip without it."""

import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from detjax.models.loading import LoadedModel, load_model
from detjax.models.weights.load import ignore_progress
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh

ROOT = Path(__file__).parents[1]


def _example() -> Any:
    spec = importlib.util.spec_from_file_location("smollm2", ROOT / "examples" / "smollm2.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = _example()


def real_folder() -> Path:
    """The folder of the model; skips the test if it is not there.

    `DETJAX_NO_SKIP=1` turns the skip into a failure.
    """
    folder = example.default_folder()
    if not folder.exists():
        pytest.skip(f"{folder} is not there; `python examples/smollm2.py` makes it")
    return folder


def goldens() -> dict[str, Any]:
    """What transformers computes with the model, by `tools/make_real_goldens.py`."""
    return json.loads((ROOT / "tests" / "golden" / "real" / "smollm2.json").read_text())


def real_model(dtype: str, *, dp: int = 1) -> LoadedModel:
    """The model on virtual devices, loaded once; skips the test if it is not there."""
    return _loaded(dtype, dp)


@cache
def _loaded(dtype: str, dp: int) -> LoadedModel:
    return load_model(
        str(real_folder()),
        revision=None,
        profile=NumericsProfile(weight_dtype=dtype, compute_dtype=dtype),
        mesh=make_mesh(dp, 1),
        backend=Backend.PORTABLE,
        progress=ignore_progress,
    )
