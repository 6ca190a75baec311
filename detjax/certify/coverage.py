# SPDX-License-Identifier: Apache-2.0
"""Which model x dtype x backend x mode is proven, refused, or not covered."""

import itertools
from collections.abc import Collection

from detjax.cli.options import DTYPES
from detjax.defaults import AUTO
from detjax.engine.config import MODES
from detjax.models.abstract import why_unsupported
from detjax.models.config import ModelConfig
from detjax.models.loading import LoadedModel
from detjax.models.registry import FAMILIES
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import TP_AXIS

THIS = "this model"
COLUMNS = ("model", "dtype", "backend", "mode", "state")

CoverageRow = tuple[str, str, str, str, str]

_ANSWERS, _SM90 = "tests/invariance/test_answers.py", "tests/invariance/test_answers_sm90.py"
_BACKENDS = "tests/invariance/test_backend_answers.py"
_OLDER = {"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"}
_FAMILIES = "tests/invariance/test_families.py"
_FLOAT32 = f"{_ANSWERS}::test_float32_profiles_are_bitwise_mesh_and_batch_invariant"
TESTED: dict[tuple[str, str, str, str], str] = {
    **{
        (name, "bfloat16", backend, mode): _BACKENDS
        for name in ("llama", "qwen3", "qwen3_moe")
        for backend in ("portable", "reference")
        for mode in ("invariant", "dvr")
    },
    ("llama", "bfloat16", "sm90", "invariant"): _SM90,
    ("llama", "bfloat16", "sm90", "dvr"): (
        f"{_SM90}::test_answers_do_not_depend_on_the_tokens_of_a_launch"
    ),
    ("mistral", "float32", "portable", "invariant"): _FLOAT32,
    ("qwen2", "float32", "portable", "invariant"): _FLOAT32,
    ("qwen2", "bfloat16", "sm90", "invariant"): _SM90,
    ("qwen3", "bfloat16", "sm90", "invariant"): _SM90,
    ("qwen3", "bfloat16", "sm90", "dvr"): (
        f"{_SM90}::test_answers_do_not_depend_on_the_tokens_of_a_launch"
    ),
    **{
        (name, "bfloat16", "portable", "invariant"): _FAMILIES
        for name in (family.name for family in FAMILIES)
        if name not in _OLDER
    },
    **{
        (name, "bfloat16", "sm90", "invariant"): "tests/invariance/test_families_sm90.py"
        for name in (
            "exaone4", "gemma2", "gemma3_text", "glm4", "glm4_moe", "gpt_oss", "granite",
            "ministral3", "olmo2", "olmo3", "phi3", "qwen2_moe", "qwen3_5_moe_text",
            "qwen3_5_text", "qwen3_next", "seed_oss", "smollm3",
        )
    },
}  # fmt: skip
"""What tests of detjax prove with models that have what makes the family: biases of qwen2, norms of
heads of qwen3, the window of mistral. They ran where detjax was made, not here."""


REFUSED: dict[tuple[str, Backend], str] = {
    ("float32", Backend.SM90): (
        "sm90 linear multiplies bfloat16 or float32 activations by bfloat16 weights, not float32 "
        "by float32; use portable"
    ),
    ("float32", Backend.REFERENCE): (
        "the reference backend takes bfloat16 or float32 with bfloat16 weights, not float32 with "
        "float32; use portable"
    ),
}
"""What a backend refuses in every family, by dtype. Tracing each of them takes seconds: a test does
that, and finds the same."""


def refusals(
    config: ModelConfig, tp: int, kv_cache_dtype: str = AUTO
) -> dict[tuple[str, Backend], str | None]:
    """Return why each backend refuses this model, by dtype; every kernel of a step is traced.

    A cache of float8 is that of bfloat16 compute.
    """
    return {
        (dtype, backend): why_unsupported(config, _profile_of(dtype, kv_cache_dtype), backend, tp)
        for dtype in DTYPES
        for backend in Backend
    }


def _profile_of(dtype: str, kv_cache_dtype: str) -> NumericsProfile:
    return NumericsProfile.of(dtype, kv_cache_dtype if dtype == "bfloat16" else AUTO)


def coverage_map(
    model: LoadedModel, *, modes: Collection[str], is_proven: bool
) -> list[CoverageRow]:
    """Return (model, dtype, backend, mode, state) for this model, then for every family.

    Args:
        model: The model under proof.
        modes: Modes that were run.
        is_proven: Whether no bit differed.
    """

    def state(name: str, dtype: str, backend: Backend, mode: str) -> str:
        if mode == "fast":
            return "no claim is made"
        if reason := refused[name].get((dtype, backend)):
            return f"refused: {reason}"
        if name != THIS:
            test = TESTED.get((name, dtype, backend.value, mode))
            return f"tested: {test}" if test else "not covered"
        profile = _profile_of(dtype, model.profile.kv_cache_dtype)
        if (profile, backend) != (model.profile, model.backend) or mode not in modes:
            return "not covered by this run"
        return "proven here" if is_proven else "not proven"

    own = refusals(model.config, model.mesh.shape[TP_AXIS], model.profile.kv_cache_dtype)
    refused = {THIS: own} | {family.name: REFUSED for family in FAMILIES}
    names = THIS, *(family.name for family in FAMILIES)
    return [
        (name, dtype, backend.value, mode, state(name, dtype, backend, mode))
        for name, dtype, backend, mode in itertools.product(names, DTYPES, Backend, MODES)
    ]
