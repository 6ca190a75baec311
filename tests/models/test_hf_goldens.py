# SPDX-License-Identifier: Apache-2.0
"""Logits of every family against Hugging Face transformers, in both dtypes."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors import safe_open

from detjax.engine.running.device_arrays import empty_pages
from detjax.models.loading import load_model
from detjax.models.weights.load import ignore_progress
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh
from detjax.testing.cases import quick_and_slow
from detjax.testing.dummies import batch_of, scoring_step

GOLDENS = Path(__file__).parents[1] / "golden" / "hf"
CASES = tuple(sorted(path.name for path in GOLDENS.iterdir()))
QUICK = (
    *((case, "float32") for case in ("llama31", "llama_bias", "mistral_window", "qwen3")),
    ("qwen25", "bfloat16"),
)
"""One of each family, with tied weights, biases, norms of heads and a window among them."""


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
    facts, references = _expected(case)
    model = load_model(
        str(GOLDENS / case),
        revision=None,
        profile=NumericsProfile(weight_dtype=dtype, compute_dtype=dtype),
        mesh=make_mesh(1, 1),
        backend=Backend.PORTABLE,
        progress=ignore_progress,
    )
    rows = [(prompt["ids"], 0) for prompt in facts["prompts"]]
    num_blocks = -(-max(len(ids) for ids, _ in rows) // 128)
    table = np.arange(len(rows) * num_blocks, dtype=np.int32).reshape(len(rows), num_blocks)
    step = scoring_step(model)
    _, logits = step(empty_pages(model, table.size), batch_of(rows, table))
    logits = np.asarray(logits)
    errors = [
        np.abs(logits[i, prompt["positions"]] - reference).max()
        for i, (prompt, reference) in enumerate(zip(facts["prompts"], references, strict=True))
    ]
    theirs = facts["errors"][f"max_abs_{dtype}_minus_float64"]
    allowed = theirs * (2 if dtype == "bfloat16" else 4)
    assert max(errors) <= allowed, f"{case}: {max(errors):.3g} from float64, allowed {allowed:.3g}"
    assert allowed < facts["errors"]["control_max_abs_change"]
    if dtype == "float32":
        for i, (prompt, (ids, _)) in enumerate(zip(facts["prompts"], rows, strict=True)):
            assert int(logits[i, len(ids) - 1].argmax()) == prompt["greedy_ids"][0]
    jax.clear_caches()
