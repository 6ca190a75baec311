# SPDX-License-Identifier: Apache-2.0
"""Every kernel of a small model under compute-sanitizer: no access out of bounds, no bad sync."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ANSWERS = Path(__file__).with_name("sanitized.py")

# A buffer for each array, so that an access past its end leaves its allocation; plain launches.
ENVIRONMENT = os.environ | {
    "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
    "XLA_FLAGS": "--xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0",
}

SECONDS = 400

OUT_OF_BOUNDS = """
import torch, triton, triton.language as tl

@triton.jit
def write_far(at):
    tl.store(at + (1 << 36), 1.0)

write_far[(1,)](torch.zeros(1, device="cuda"))
torch.cuda.synchronize()
"""


def sanitized(tool: str, *command: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not os.path.exists(sanitizer):
        pytest.skip(f"no compute-sanitizer here (looked for {sanitizer})")
    run = [sanitizer, "--tool", tool, "--error-exitcode", "99"]
    run += ["--target-processes", "application-only", sys.executable, *map(str, command)]
    try:
        result = subprocess.run(
            run, env=ENVIRONMENT | env, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"not done in {SECONDS} s: {(error.stdout or b'')[-2000:].decode()}")
    if "Device not supported" in result.stdout + result.stderr:
        pytest.skip("compute-sanitizer does not support this device")
    return result


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, str]:
    """Compile outside the sanitizer, which slows all of the process down."""
    env = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("programs")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    subprocess.run([sys.executable, str(ANSWERS), "sm90"], env=ENVIRONMENT | env, check=True)
    return env


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
def test_answers_are_clean(tool, compiled):
    result = sanitized(tool, ANSWERS, "sm90", **compiled)
    said = result.stdout + result.stderr
    assert "answered [3, 3]" in said, said[-4000:]
    assert "ERROR SUMMARY: 0 errors" in said, said[-4000:]
    assert result.returncode == 0, said[-4000:]


@pytest.mark.control
def test_control_it_sees_a_write_out_of_bounds(tmp_path):
    program = tmp_path / "out_of_bounds.py"
    program.write_text(OUT_OF_BOUNDS)
    result = sanitized("memcheck", program)
    said = result.stdout + result.stderr
    assert "Invalid __global__ write" in said, said[-4000:]
    assert result.returncode != 0
