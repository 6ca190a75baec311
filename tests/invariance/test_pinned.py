# SPDX-License-Identifier: Apache-2.0
"""Bits of the bundled model under each profile, pinned with the fingerprint that they belong to.

A change of a bit raises NUMERICS_VERSION, which changes the fingerprint, and adds the new digests
here and a Bits entry to the changelog. To add those of another processor or build, run

    python -m pytest tests/invariance/test_pinned.py -rs

there: the skip names the fingerprint and the digest.
"""

import pytest

from detjax.models.bundled import bundled_model_path
from detjax.models.loading import load_model
from detjax.models.tokenizer import Tokenizer
from detjax.numerics import NUMERICS_VERSION, NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh
from detjax.serving.config import EngineConfig
from detjax.serving.engine import Engine
from detjax.serving.request import Request, SamplingParams

PROMPT = "The old house by the sea"
PROFILES = {
    "bfloat16": NumericsProfile(),
    "float32": NumericsProfile(weight_dtype="float32", compute_dtype="float32"),
}
VERSION = 1
"""Of the numerics that the digests below are of."""

DIGESTS = {
    "bfloat16": {"c333dad1f2e0a4f5": ("af6a680db9f4d53a", "f52a597d24fb1cb4")},
    "float32": {"2f097bd1a99d19b1": ("c805a17bbefd8332", "add7c874425b336f")},
}
"""By profile and fingerprint: of the greedy answer of the README, and of a sampled one."""


def digests(profile: NumericsProfile) -> tuple[str, tuple[str, str]]:
    """The fingerprint, and what the bundled model says."""
    model = load_model(
        str(bundled_model_path()), profile=profile, mesh=make_mesh(1, 1), backend=Backend.PORTABLE
    )
    prompt = tuple(Tokenizer.from_folder(bundled_model_path()).encode(PROMPT))
    engine = Engine(model, EngineConfig(batch_size=1, prefill_chunk=64, max_len=256))
    greedy, sampled = engine.generate(
        [
            Request(prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=64)),
            Request(
                prompt_token_ids=prompt,
                sampling=SamplingParams(max_tokens=24, temperature=0.9, seed=2**32 + 5),
            ),
        ]
    )
    return model.fingerprint, (greedy.digest(), sampled.digest())


@pytest.mark.golden
@pytest.mark.parametrize("name", PROFILES)
def test_bits_are_those_of_this_numerics_version(name):
    assert VERSION == NUMERICS_VERSION, "new bits have new digests: pin them"
    fingerprint, found = digests(PROFILES[name])
    if fingerprint not in DIGESTS[name]:
        pytest.skip(f"no digest is pinned for {name} {fingerprint}, which gives {found}")
    assert tuple(d[:16] for d in found) == DIGESTS[name][fingerprint], (
        "a bit has changed: raise NUMERICS_VERSION, pin the new digests and add a Bits entry to "
        "CHANGELOG.md"
    )
