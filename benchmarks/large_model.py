# SPDX-License-Identifier: Apache-2.0
"""Write a folder of 8B shapes with random weights, the same bytes on every machine.

    python -m benchmarks.large_model FOLDER --layers 4
    python -m detjax.generate --model FOLDER --prompt "It was late" --receipts answers.jsonl
    python -m detjax.audit --model FOLDER --backend reference answers.jsonl

The first two commands run on a GPU, and the first and the last elsewhere. Four layers of 32 with
embeddings and head are 3.8 GB, all 32 are 16.1. Receipts name the hash of all weights, so an audit
finds out whether two machines have the same.
"""

import argparse
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tqdm import tqdm

from detjax.models.hf_config import config_from_hf
from detjax.models.params import ParamRole, TensorSpec, tensor_specs
from detjax.testing.folders import byte_tokenizer

SHAPES = Path(__file__).parent / "shapes" / "llama3_8b.json"
SPREAD = 74
"""Standard deviation of integers from -128 to 127."""


def draw(name: str, spec: TensorSpec) -> np.ndarray:
    """Integers of a seeded generator, times a power of two: no library function rounds them.

    Matrices have a variance of about `1 / fan_in`, and gains are 1 and a little.
    """
    drawn = np.random.default_rng([7, *name.encode()]).integers(-128, 128, spec.hf_shape, np.int8)
    values = drawn.astype(np.float32)
    if spec.role is ParamRole.GAIN:
        return (1 + values * 2.0**-9).astype(ml_dtypes.bfloat16)
    factor = 2.0 ** round(np.log2(spec.hf_shape[-1] ** -0.5 / SPREAD))
    return (values * np.float32(factor)).astype(ml_dtypes.bfloat16)


def write_folder(folder: Path, num_layers: int) -> None:
    """Write the configuration with so many layers, a tokenizer of bytes, and the weights."""
    config = json.loads(SHAPES.read_text()) | {"num_hidden_layers": num_layers}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text("{}")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    specs = jax.tree.leaves(tensor_specs(config_from_hf(config), tp=1, vocab_block=128))
    named = {name: spec for spec in specs for name in spec.hf_names}
    files = {name: _file_of(name) for name in named}
    with ThreadPoolExecutor() as pool:
        for file in tqdm(sorted(set(files.values())), desc="files", unit="file"):
            names = [name for name in named if files[name] == file]
            drawn = pool.map(draw, names, [named[name] for name in names])
            save_file(dict(zip(names, drawn, strict=True)), folder / file)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _file_of(name: str) -> str:
    """A file a layer, and one for the rest: no more than that lies in memory at once."""
    layer = re.search(r"layers\.(\d+)\.", name)
    return f"model-{int(layer[1]) + 1 if layer else 0:05d}.safetensors"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="made here")
    parser.add_argument("--layers", type=int, default=4, help="of 32 (default: 4)")
    args = parser.parse_args()
    write_folder(args.folder, args.layers)


if __name__ == "__main__":
    main()
