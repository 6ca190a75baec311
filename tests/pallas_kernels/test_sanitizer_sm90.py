# SPDX-License-Identifier: Apache-2.0
"""Every kernel of a small model's answer under compute-sanitizer: no access out of bounds, no misuse of a barrier."""

import os
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

# A buffer for each array: an access past its end leaves its allocation.
ENVIRONMENT = os.environ | {
    "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}
ANSWERS = "detjax.generate --backend sm90 --prompt The --prompt".split() + [
    "The old house by the sea had stood empty for years, and nobody remembered who had built it."
]
ANSWERS += "--max-tokens 3 --batch-size 2 --prefill-chunk 16".split()

OUT_OF_BOUNDS = """
import torch, triton, triton.language as tl

@triton.jit
def write_far(at):
    tl.store(at + (1 << 36), 1.0)

write_far[(1,)](torch.zeros(1, device="cuda"))
torch.cuda.synchronize()
"""


def sanitized(tool: str, *command: str) -> subprocess.CompletedProcess[str]:
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not os.path.exists(sanitizer):
        pytest.skip(f"no compute-sanitizer here (looked for {sanitizer})")
    run = [sanitizer, "--tool", tool, "--error-exitcode", "99", sys.executable, *command]
    result = subprocess.run(run, env=ENVIRONMENT, capture_output=True, text=True, timeout=500)
    if "Device not supported" in result.stdout + result.stderr:
        pytest.skip("compute-sanitizer does not support this device")
    return result


@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
def test_an_answer_is_clean(tool):
    result = sanitized(tool, "-m", *ANSWERS)
    said = result.stdout + result.stderr
    assert "ERROR SUMMARY: 0 errors" in said, said[-4000:]
    assert result.returncode == 0, said[-4000:]


@pytest.mark.control
def test_control_it_sees_a_write_out_of_bounds(tmp_path):
    program = tmp_path / "out_of_bounds.py"
    program.write_text(OUT_OF_BOUNDS)
    result = sanitized("memcheck", str(program))
    said = result.stdout + result.stderr
    assert "Invalid __global__ write" in said, said[-4000:]
    assert result.returncode != 0
