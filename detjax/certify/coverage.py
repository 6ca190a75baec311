# SPDX-License-Identifier: Apache-2.0
"""Which model x dtype x backend x mode is proven, refused, or not covered."""

from collections.abc import Collection

from detjax.models.abstract import why_unsupported
from detjax.models.config import ModelConfig
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


def coverage_map(
    model: LoadedModel, *, modes: Collection[str], is_proven: bool
) -> list[tuple[str, str, str, str, str]]:
    """(model, dtype, backend, mode, state): of this model, then of every family.

    Args:
        model: Under proof.
        modes: That were run.
        is_proven: Whether no bit differed.
    """

    def own(profile: NumericsProfile, backend: Backend, mode: str) -> str:
        is_this = (profile, backend) == (model.profile, model.backend) and mode in modes
        if not is_this:
            return "not covered by this run"
        return "proven here" if is_proven else "not proven"

    tp = model.mesh.shape[TP_AXIS]
    rows = _rows(THIS, model.config, tp, own)
    for family in FAMILIES:
        published = {"architectures": [family.architectures[0]], "model_type": family.name}

        def tested(profile, backend, mode, name=family.name) -> str:
            test = TESTED.get((name, profile.compute_dtype, backend.value, mode))
            return f"tested: {test}" if test else "not covered"

        rows += _rows(family.name, config_from_hf(published), 1, tested)
    return rows


def _rows(name: str, config: ModelConfig, tp: int, state) -> list[Row]:
    rows = []
    for dtype in DTYPES:
        profile = NumericsProfile(weight_dtype=dtype, compute_dtype=dtype)
        for backend in Backend:
            refused = why_unsupported(config, profile, backend, tp)
            for mode in MODES:
                if mode == "fast":
                    said = "no claim is made"
                elif refused is not None:
                    said = f"refused: {refused}"
                else:
                    said = state(profile, backend, mode)
                rows.append((name, dtype, backend.value, mode, said))
    return rows
