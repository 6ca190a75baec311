# SPDX-License-Identifier: Apache-2.0
"""Bits of the bundled model under each profile, pinned with the build that they belong to.

A change of a bit raises NUMERICS_VERSION, which changes every fingerprint, and adds the new digests
here and a Bits entry to the changelog. To add those of another processor or build, run

    python -m pytest tests/invariance/test_pinned.py -rs

there: the skip names the build and the digest.
"""

import dataclasses
from pathlib import Path

import jax
import pytest

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.models.bundled import bundled_model_path
from detjax.models.loading import load_model
from detjax.models.tokenizer import Tokenizer
from detjax.numerics import NUMERICS_VERSION, Build, NumericsProfile, fingerprint
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh

PROMPT = "The old house by the sea"
README = (Path(__file__).parents[2] / "README.md").read_text()
PROFILES = {
    "bfloat16": NumericsProfile(),
    "float32": NumericsProfile(weight_dtype="float32", compute_dtype="float32"),
}
VERSION = 2
"""Of the numerics that the digests below are of."""

DIGESTS = {
    "bfloat16": {"417c7648c1099ff4": ("af6a680db9f4d53a", "42595739a9f14d79")},
    "float32": {"34ace16a201a9db4": ("c805a17bbefd8332", "90eebb1d4b0f8714")},
}
"""Of `portable`, by profile and `build_of`: of the greedy answer of the README, and of a sampled
one."""
EVERYWHERE = ("062884f6309d25d8", "08ddb306d421dd77", "b9a0e49a59a2ad99")
"""Of `reference`, on every machine, and of `sm90`. The last is that of 48 tokens in the README."""


def build_of(profile: NumericsProfile) -> str:
    """The fingerprint, less detjax's own version and source: those may change, and no bit may."""
    build = Build.current("portable", jax.devices("cpu")[0])
    return fingerprint(profile, dataclasses.replace(build, detjax="", source=""))


def digests(profile: NumericsProfile, backend: Backend = Backend.PORTABLE) -> list[str]:
    """What the bundled model says."""
    model = load_model(
        str(bundled_model_path()), profile=profile, mesh=make_mesh(1, 1), backend=backend
    )
    prompt = tuple(Tokenizer.from_folder(bundled_model_path()).encode(PROMPT))
    engine = Engine(model, EngineConfig(batch_size=1, prefill_chunk=64, max_len=256))
    found = engine.generate(
        [
            Request(prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=64)),
            Request(
                prompt_token_ids=prompt,
                sampling=SamplingParams(max_tokens=24, temperature=0.9, seed=2**32 + 5),
            ),
            Request(prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=48)),
        ]
    )
    return [completion.digest() for completion in found]


@pytest.mark.golden
def test_bits_of_the_reference_are_those_of_this_numerics_version():
    assert VERSION == NUMERICS_VERSION, "new bits have new digests: pin them"
    assert EVERYWHERE[2][:8] in README
    found = digests(PROFILES["bfloat16"], Backend.REFERENCE)
    assert tuple(d[:16] for d in found) == EVERYWHERE


@pytest.mark.slow
@pytest.mark.golden
@pytest.mark.parametrize("name", PROFILES)
def test_bits_are_those_of_this_numerics_version(name):
    assert VERSION == NUMERICS_VERSION, "new bits have new digests: pin them"
    build, found = build_of(PROFILES[name]), digests(PROFILES[name])
    if build not in DIGESTS[name]:
        pytest.skip(f"no digest is pinned for {name} {build}, which gives {found}")
    assert tuple(d[:16] for d in found[:2]) == DIGESTS[name][build], (
        "a bit has changed: raise NUMERICS_VERSION, pin the new digests and add a Bits entry to "
        "CHANGELOG.md"
    )
