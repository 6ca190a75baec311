# SPDX-License-Identifier: Apache-2.0
"""Send the weights of a trainer in another framework to an engine, tensor by tensor.

The engine keeps running, and gets the weights after every update.

    python examples/stream_weights.py [FOLDER]

The trainer of this example makes small changes to a checkpoint's tensors. They are torch tensors if
torch is installed, else NumPy arrays. With a real trainer pass `module.state_dict().items()`, or
under FSDP2 `((name, tensor.full_tensor()) for name, tensor in module.state_dict().items())`.
"""

import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path

from safetensors import safe_open

import detjax

folder = Path(sys.argv[1] if len(sys.argv) > 1 else detjax.bundled_model_path())
framework = "pt" if importlib.util.find_spec("torch") else "np"


def trainer_tensors(step: int):
    """What the trainer holds after `step` updates: Hugging Face names, one tensor at a time."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework=framework) as file:
            for name in file.keys():
                yield name, file.get_tensor(name) * 0.5**step  # keeps the dtype


llm = detjax.LLM(str(folder), max_len=128)
sampling = detjax.SamplingParams(max_tokens=8, temperature=1.0, seed=1)
for step in range(3):
    llm.engine.load_named_weights(trainer_tensors(step), version=step)
    completion = llm.generate(["17+26="], sampling)[0].outputs[0].completion
    assert completion.weight_version == step
    print(f"weights {step}: {completion.digest()[:16]}")

# A folder with the same tensors gives the same bits.
if framework == "pt":
    from safetensors.torch import save_file
else:
    from safetensors.numpy import save_file
with tempfile.TemporaryDirectory() as copy:
    shutil.copytree(folder, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetens*"))
    save_file(dict(trainer_tensors(2)), Path(copy, "model.safetensors"))
    loaded = detjax.LLM(copy, max_len=128).generate(["17+26="], sampling)[0].outputs[0]
assert loaded.digest() == completion.digest()
print("the same tensors, read from a folder: every bit equal")
