# SPDX-License-Identifier: Apache-2.0
"""Which model x dtype x backend x mode is proven, refused, or not covered."""

from collections.abc import Collection

from detjax.models.abstract import why_unsupported
from detjax.models.hf_config import config_from_hf
from detjax.models.loading import LoadedModel
from detjax.models.registry import FAMILIES
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import TP_AXIS
from detjax.serving.config import MODES

DTYPES = ("bfloat16", "float32")
THIS = "this model"
COLUMNS = ("model", "dtype", "backend", "mode", "state")

Row = tuple[str, str, str, str, str]
Refusals = dict[tuple[str, str, Backend], str | None]
"""By name of the model, dtype and backend: why it refuses; None where it does not."""

_ANSWERS, _SM90 = "tests/invariance/test_answers.py", "tests/invariance/test_answers_sm90.py"
_EXPERTS = "tests/invariance/test_expert_answers.py"
_FLOAT32 = f"{_ANSWERS}::test_float32_profiles_are_bitwise_mesh_and_batch_invariant"
TESTED: dict[tuple[str, str, str, str], str] = {
    ("llama", "bfloat16", "portable", "invariant"): _ANSWERS,
    ("llama", "bfloat16", "portable", "dvr"): "tests/invariance/test_schedules.py",
    ("llama", "bfloat16", "sm90", "invariant"): _SM90,
    ("llama", "bfloat16", "sm90", "dvr"): (
        f"{_SM90}::test_answers_do_not_depend_on_the_tokens_of_a_launch"
    ),
    ("mistral", "float32", "portable", "invariant"): _FLOAT32,
    ("qwen2", "float32", "portable", "invariant"): _FLOAT32,
    ("qwen2", "bfloat16", "sm90", "invariant"): _SM90,
    ("qwen3", "bfloat16", "portable", "invariant"): (
        f"{_ANSWERS}::test_answers_are_bitwise_mesh_invariant"
    ),
    ("qwen3", "bfloat16", "sm90", "invariant"): _SM90,
    ("qwen3", "bfloat16", "sm90", "dvr"): (
        f"{_SM90}::test_answers_do_not_depend_on_the_tokens_of_a_launch"
    ),
    ("qwen3_moe", "bfloat16", "portable", "invariant"): _EXPERTS,
    ("qwen3_moe", "bfloat16", "portable", "dvr"): (
        f"{_EXPERTS}::test_answers_are_bitwise_schedule_invariant"
    ),
}
"""What tests of detjax prove with models that have what makes the family: biases of qwen2, norms of
heads of qwen3, the window of mistral. They ran where detjax was made, not here."""


def refusals(model: LoadedModel) -> Refusals:
    """Why each backend refuses this model, and a model of each family, by name, dtype, backend.

    It takes seconds: every kernel of a step is traced.
    """
    configs = {THIS: (model.config, model.mesh.shape[TP_AXIS])}
    for family in FAMILIES:
        published = {"architectures": [family.architectures[0]], "model_type": family.name}
        configs[family.name] = config_from_hf(published), 1
    return {
        (name, dtype, backend): why_unsupported(
            config, NumericsProfile(weight_dtype=dtype, compute_dtype=dtype), backend, tp
        )
        for name, (config, tp) in configs.items()
        for dtype in DTYPES
        for backend in Backend
    }


def coverage_map(
    model: LoadedModel, refused: Refusals, *, modes: Collection[str], is_proven: bool
) -> list[Row]:
    """(model, dtype, backend, mode, state): of this model, then of every family.

    Args:
        model: Under proof.
        refused: As `refusals` has it.
        modes: That were run.
        is_proven: Whether no bit differed.
    """

    def state(name: str, dtype: str, backend: Backend, mode: str) -> str:
        if mode == "fast":
            return "no claim is made"
        if reason := refused[name, dtype, backend]:
            return f"refused: {reason}"
        if name != THIS:
            test = TESTED.get((name, dtype, backend.value, mode))
            return f"tested: {test}" if test else "not covered"
        profile = NumericsProfile(weight_dtype=dtype, compute_dtype=dtype)
        if (profile, backend) != (model.profile, model.backend) or mode not in modes:
            return "not covered by this run"
        return "proven here" if is_proven else "not proven"

    return [
        (name, dtype, backend.value, mode, state(name, dtype, backend, mode))
        for name, dtype, backend in refused
        for mode in MODES
    ]
