# SPDX-License-Identifier: Apache-2.0
"""Logits of every family against Hugging Face transformers, in both dtypes."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors import safe_open

from detjax.engine.running.device_arrays import empty_pages
from detjax.models.forward_paths import KernelMode
from detjax.models.hf_config import load_config
from detjax.models.loading import load_model
from detjax.models.weights.load import ignore_progress
from detjax.numerics import NumericsProfile
from detjax.parallel.mesh import make_mesh
from detjax.testing.cases import quick_and_slow
from detjax.testing.dummies import batch_of, cpu_backend, scoring_step

GOLDENS = Path(__file__).parents[1] / "golden" / "hf"
CASES = tuple(sorted(path.name for path in GOLDENS.iterdir()))
QUICK = tuple((case, "bfloat16") for case in ("gemma2", "gpt_oss", "granite"))
"""Windows, soft caps, tied weights, sinks, experts and multipliers are among them."""

FAMILIES = (
    "exaone4", "gemma2", "gemma3", "glm4", "gpt_oss", "granite", "olmo2", "olmo3", "phi4_longrope",
    "qwen3_5", "qwen3_5_moe", "ministral3", "glm4_moe", "qwen3_next",
)  # fmt: skip


def _expected(case: str) -> tuple[dict, list[np.ndarray]]:
    facts = json.loads((GOLDENS / case / "expected.json").read_text())
    with safe_open(GOLDENS / case / "expected.safetensors", framework="np") as file:
        logits = [
            file.get_tensor(f"prompt{i}.logits_float64") for i in range(len(facts["prompts"]))
        ]
    return facts, logits


@pytest.mark.golden
@pytest.mark.parametrize(
    ("case", "dtype"),
    quick_and_slow(QUICK, [(case, dtype) for case in CASES for dtype in ("float32", "bfloat16")]),
)
def test_logits_are_as_close_to_float64_as_those_of_transformers(case, dtype):
    """Tolerance: the distance of transformers' own logits in this dtype from float64.

    Both programs round the same function in the same dtype, so their errors are draws of one size;
    the largest of a few thousand may differ between two draws by a factor below 2 (bfloat16, where
    detjax rounds less often) or 4 (float32, where sums are long and only their order differs).
    The golden's control, one named mistake in reading the model, moves the logits further.
    """
    facts, logits, error = _computed(case, dtype, "invariant")
    theirs = facts["errors"][f"max_abs_{dtype}_minus_float64"]
    allowed = theirs * (2 if dtype == "bfloat16" else 4)
    assert error <= allowed, f"{case}: {error:.3g} from float64, allowed {allowed:.3g}"
    assert allowed < facts["errors"]["control_max_abs_change"]
    if dtype == "float32":
        for i, prompt in enumerate(facts["prompts"]):
            assert int(logits[i, len(prompt["ids"]) - 1].argmax()) == prompt["greedy_ids"][0]
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.golden
@pytest.mark.parametrize("case", quick_and_slow(("olmo3", "gemma2"), FAMILIES))
def test_the_path_without_claims_computes_the_same_function(case):
    """Of families whose layers are more than those of Llama. Its products may add in any order."""
    facts, _, error = _computed(case, "float32", "fast")
    allowed = 4 * facts["errors"]["max_abs_float32_minus_float64"]
    assert error <= allowed < facts["errors"]["control_max_abs_change"]
    jax.clear_caches()


def _computed(case: str, dtype: str, kernels: KernelMode) -> tuple[dict, np.ndarray, float]:
    """The golden's facts, logits of its prompts, and their largest distance from float64."""
    facts, references = _expected(case)
    profile = NumericsProfile(weight_dtype=dtype, compute_dtype=dtype)
    model = load_model(
        str(GOLDENS / case),
        revision=None,
        profile=profile,
        mesh=make_mesh(1, 1),
        backend=cpu_backend(load_config(GOLDENS / case), profile),
        progress=ignore_progress,
    )
    rows = [(prompt["ids"], 0) for prompt in facts["prompts"]]
    num_blocks = -(-max(len(ids) for ids, _ in rows) // 128)
    table = np.arange(len(rows) * num_blocks, dtype=np.int32).reshape(len(rows), num_blocks)
    step = scoring_step(model, kernels)
    _, logits = step(empty_pages(model, table.size), batch_of(rows, table))
    logits = np.asarray(logits)
    errors = [
        np.abs(logits[i, prompt["positions"]] - reference).max()
        for i, (prompt, reference) in enumerate(zip(facts["prompts"], references, strict=True))
    ]
    return facts, logits, max(errors)
