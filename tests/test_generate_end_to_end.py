# SPDX-License-Identifier: Apache-2.0
"""Real models: the command as a user starts it, and a text that others have published.

Each compiled program takes seconds, so the runs are few and small and share what they compile.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.outputs.completion import Completion
from detjax.engine.outputs.request_output import FinishReason
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.models.bundled import bundled_model_path
from detjax.models.loading import load_model
from detjax.models.tokenizer import Tokenizer
from detjax.models.weights.load import ignore_progress
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh

PROMPTS = ("It was a dark night", "The sea")
STORIES = Path(__file__).parents[2] / "shared" / "data" / "weights" / "stories260K"

Run = Callable[..., subprocess.CompletedProcess[bytes]]


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Run:
    """Start the command in a process of its own: (options..., stdin=) -> what it did."""
    programs = tmp_path_factory.mktemp("programs")

    def start(*argv: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-m", "detjax.generate", "--cache-dir", str(programs), *argv]
        return subprocess.run(command, input=stdin, capture_output=True, timeout=300)

    return start


@pytest.fixture(scope="module")
def checked(run) -> subprocess.CompletedProcess[bytes]:
    """Two prompts on two devices, run twice and compared."""
    prompts = ("--prompt", PROMPTS[0], "--prompt", PROMPTS[1], "--max-tokens", "6")
    return run(*prompts, "--tp", "2", "--repeat", "2", "--check", "--format", "json")


@pytest.mark.slow
def test_a_check_of_the_bundled_model_passes(checked):
    document, err = json.loads(checked.stdout), checked.stderr.decode()
    assert checked.returncode == 0, err
    assert document["check"] == {"num_runs": 2, "differences": []}
    assert "run 2 of 2: equal to run 1" in err
    assert f"all 2 runs equal, digest {document['digest']}" in err


@pytest.mark.slow
def test_the_digest_is_that_of_the_written_ids_and_logprobs(checked):
    for entry in json.loads(checked.stdout)["completions"]:
        assert len(entry["token_ids"]) == len(entry["logprobs"]) == 6
        completion = Completion(
            request_idx=entry["index"],
            sequence_idx=entry["sequence"],
            prompt_token_ids=tuple(entry["prompt_token_ids"]),
            token_ids=tuple(entry["token_ids"]),
            logprobs=tuple(map(np.float32, entry["logprobs"])),
            top_logprobs=(),
            finish_reason=FinishReason(entry["finish_reason"]),
        )
        assert completion.digest() == entry["digest"]


@pytest.mark.slow
@pytest.mark.invariance
def test_another_batch_order_chunk_and_mesh_has_the_same_text_and_digests(run, checked):
    prompts = ("--prompt", PROMPTS[1], "--prompt", PROMPTS[0], "--max-tokens", "6")
    other = run(*prompts, "--batch-size", "1", "--prefill-chunk", "3")
    assert other.returncode == 0, other.stderr.decode()
    first, second = reversed(json.loads(checked.stdout)["completions"])
    assert other.stdout.decode() == (
        f"=== prompt 0, sequence 0 ===\n{first['text']}\n"
        f"=== prompt 1, sequence 0 ===\n{second['text']}\n"
    )
    digests = re.findall(r"^digest (\w+) prompt", other.stderr.decode(), re.MULTILINE)
    assert digests == [first["digest"], second["digest"]]
    assert f"fingerprint {first['fingerprint']}" in other.stderr.decode()


# ------------------------------------------------------------------------------------ float16 files


def with_weights(folder: Path, change: Callable[[np.ndarray], np.ndarray]) -> Path:
    """The bundled model with every tensor changed."""
    shutil.copytree(bundled_model_path(), folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({k: change(v) for k, v in tensors.items()}, folder / "model.safetensors")
    return folder


def as_float16(tensor: np.ndarray) -> np.ndarray:
    """float16 whose last three bits are 101 or 111: bfloat16 lacks them and rounds up."""
    half = tensor.astype(np.float16)
    return (half.view(np.uint16) | 5).view(np.float16)


@pytest.fixture(scope="module")
def float16_folder(tmp_path_factory) -> Path:
    return with_weights(tmp_path_factory.mktemp("float16") / "model", as_float16)


def greedy(run: Run, folder: Path, *argv: str) -> tuple[dict, str]:
    """The document of a greedy answer of 6 tokens, and what was told beside it."""
    prompt = ("--prompt", PROMPTS[0], "--max-tokens", "6", "--format", "json")
    done = run("--model", str(folder), *prompt, *argv)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout), done.stderr.decode()


@pytest.mark.slow
def test_a_cast_gives_the_bits_of_the_rounded_weights_under_another_fingerprint(
    run, tmp_path, float16_folder
):
    bfloat16 = jnp.dtype(jnp.bfloat16)
    rounded = with_weights(tmp_path / "rounded", lambda t: as_float16(t).astype(bfloat16))
    expected, plain = greedy(run, rounded)
    cast, told = greedy(run, float16_folder, "--cast-weights", "bfloat16", "--tp", "2")
    assert (cast["weight_cast"], expected["weight_cast"]) == ("float16 to bfloat16", "none")
    assert "bfloat16 weights (cast from float16 to bfloat16), bfloat16 compute" in told
    assert "bfloat16 weights, bfloat16 compute" in plain
    assert cast["digest"] == expected["digest"]
    assert cast["fingerprint"] != expected["fingerprint"]
    assert cast["completions"][0]["fingerprint"] == cast["fingerprint"]


@pytest.mark.slow
def test_float16_without_a_cast_is_refused_with_its_option_named(run, float16_folder):
    says = "Ask for dtype float32, which holds them exactly (--dtype float32, backend portable), "
    says += "or for the rounding: --cast-weights bfloat16"
    assert_refused(run("--model", str(float16_folder), "--prompt", "a"), says)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ((), "--cast-weights bfloat16 has nothing to convert: the weights in"),
        (("--dtype", "float32"), "--cast-weights bfloat16 does not go with --dtype float32, which"),
    ],
)
def test_a_cast_that_makes_no_sense_is_refused(run, argv, says):
    assert_refused(run("--prompt", "a", "--cast-weights", "bfloat16", *argv), says)


# ---------------------------------------------------------------------------------------- bad input


def cut_short(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def set_config(**changes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = folder / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | changes))

    return change


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        pytest.param(cut_short, "is damaged or cut short", id="cut_short"),
        pytest.param(
            set_config(architectures=["MambaForCausalLM"]),
            "['MambaForCausalLM'] is not supported",
            id="unknown_architecture",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            set_config(logit_softcap=30.0),
            "logit_softcap=30.0 is not a key that detjax knows",
            id="unknown_number",
            marks=pytest.mark.slow,
        ),
        pytest.param(shutil.rmtree, "is neither", id="missing_folder", marks=pytest.mark.slow),
    ],
)
def test_a_model_that_cannot_be_used_is_one_line(run, tmp_path, damage, says):
    folder = shutil.copytree(bundled_model_path(), tmp_path / "model")
    damage(folder)
    assert_refused(run("--model", str(folder), "--prompt", "a"), says)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "stdin", "says"),
    [
        pytest.param(
            ("--prompt", "night " * 1024), b"", "more than the model's context", id="too_long"
        ),
        pytest.param(("--prompt", "a", "--tp", "3"), b"", "must be a power of two", id="tp_3"),
        pytest.param(
            ("--prompt", "a", "--tp", "64"), b"", "split over tp in (1, 2, 4, 8)", id="tp_64"
        ),
        pytest.param(
            ("--prompt", "-"), b"a\xffb", "is not valid UTF-8 at byte 2 (0xff)", id="not_utf8"
        ),
    ],
)
def test_a_prompt_or_mesh_that_does_not_fit_is_one_line(run, argv, stdin, says):
    assert_refused(run(*argv, stdin=stdin), says)


def assert_refused(done: subprocess.CompletedProcess[bytes], says: str) -> None:
    err = done.stderr.decode()
    assert done.returncode == 2, err
    assert done.stdout == b""
    # A slow machine may have said how far it was.
    lines = [line for line in err.splitlines() if not re.match(r"[a-z ]+, \d+ s$", line)]
    assert len(lines) == 1 and lines[0].startswith("error: ") and says in lines[0], err


# ----------------------------------------------------------------------------------- published text


@pytest.mark.slow
@pytest.mark.golden
@pytest.mark.skipif(not STORIES.is_dir(), reason=f"{STORIES} is not here")
def test_greedy_stories260k_in_float32_is_the_published_text():
    profile = NumericsProfile(weight_dtype="float32", compute_dtype="float32")
    model = load_model(
        str(STORIES),
        revision=None,
        profile=profile,
        mesh=make_mesh(1, 1),
        backend=Backend.PORTABLE,
        progress=ignore_progress,
    )
    tokenizer = Tokenizer.from_folder(STORIES)
    assert tokenizer.bos_id is not None
    begin = (tokenizer.bos_id,)
    # A chunk of one token has the shape of a decode step: one program is compiled.
    engine = Engine(model, EngineConfig(batch_size=1, prefill_chunk=1, max_len=256))
    request = Request(prompt_token_ids=begin, sampling=SamplingParams(max_tokens=200))
    (completion,) = engine.generate([request])
    text = tokenizer.decode(completion.token_ids, prompt_ids=begin)
    assert text.encode() == (STORIES / "expected_greedy_200steps.txt").read_bytes()
