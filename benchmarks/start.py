# SPDX-License-Identifier: Apache-2.0
"""How long a user waits for the first token: with nothing compiled yet, and again.

python -m benchmarks.start --model bundled
python -m benchmarks.start --model llama3_8b --backend sm90 --out rows.jsonl

Each start is a process of its own: it imports detjax, makes an `LLM`, asks for one token, then for
an answer, then compiles every program that its configuration can reach. The first start finds an
empty folder for compiled programs, the others what it has left there. Of a configuration
(`llama3_8b`) a folder with random weights is written first. Exit status 3 if an answer differs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import rich.console
import rich.table

PHASES = ("imported_s", "loaded_s", "first_token_s", "answered_s", "compiled_s")
"""Seconds since the process was started: the end of each phase."""
NUM_TOKENS = 32
PROMPT = "The old house by the sea"


def measure(args: argparse.Namespace) -> None:
    """What a started process does; prints one line of JSON."""
    import detjax

    found: dict[str, float | str | int] = {"imported_s": time.time() - args.began_s}
    llm = detjax.LLM(
        args.model, backend=args.backend, show_progress=False, cache_dir=args.cache_dir
    )
    found["loaded_s"] = time.time() - args.began_s
    llm.generate(PROMPT, detjax.SamplingParams(max_tokens=1))
    found["first_token_s"] = time.time() - args.began_s
    answer = llm.generate(PROMPT, detjax.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
    found["answered_s"] = time.time() - args.began_s
    llm.engine.compile()
    found["compiled_s"] = time.time() - args.began_s
    stats = llm.engine.stats()
    found |= {
        "digest": answer[0].outputs[0].digest(),
        "backend": llm.config.backend.value,
        "programs": len(list(llm.engine.programs)),
        "compile_s": stats.compile_s,
        "self_check_s": stats.self_check_s,
    }
    print(json.dumps(found), flush=True)


def start(args: argparse.Namespace, model: str, cache_dir: str) -> dict:
    """Start a process and return what it found."""
    began_s = time.time()
    run = subprocess.run(
        [
            sys.executable, "-m", "benchmarks.start", "--measure", "--began-s", repr(began_s),
            "--model", model, "--backend", args.backend, "--cache-dir", cache_dir,
        ],
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return json.loads(run.stdout.strip().rpartition("\n")[2])


def write_random(name: str, folder: Path) -> str:
    """Write a folder of a configuration with random weights, in a process of its own."""
    program = (
        "import sys, pathlib; from benchmarks.start import write_folder; "
        "write_folder(sys.argv[1], pathlib.Path(sys.argv[2]))"
    )
    subprocess.run([sys.executable, "-c", program, name, str(folder)], check=True)
    return str(folder)


def write_folder(name: str, folder: Path) -> None:
    """As Hugging Face has it, with a tokenizer of bytes; the weights are of one small pattern.

    Raises:
        ValueError: If the tensors of the configuration are not those of a Llama.
    """
    import jax
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    from benchmarks.step import MODELS
    from detjax.models.hf_config import config_from_hf
    from detjax.models.params import tensor_specs
    from detjax.testing.folders import byte_tokenizer

    config = MODELS[name]
    written: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    specs = [
        (hf_name, spec.hf_shape)
        for spec in jax.tree.leaves(tensor_specs(config, tp=1, vocab_block=128))
        for hf_name in spec.hf_names
    ]
    of_llama = jax.tree.leaves(tensor_specs(config_from_hf(written), tp=1, vocab_block=128))
    if specs != [(hf_name, spec.hf_shape) for spec in of_llama for hf_name in spec.hf_names]:
        raise ValueError(f"{name} has other tensors than a Llama; give a folder of it")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(written))
    (folder / "tokenizer_config.json").write_text("{}")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    pattern = np.random.default_rng(0).standard_normal(1 << 20, np.float32) * 0.02
    pattern = pattern.astype(ml_dtypes.bfloat16)
    weight_map: dict[str, str] = {}
    for first in range(0, len(specs), 40):
        file = f"model-{first // 40:05d}.safetensors"
        tensors = {
            hf_name: np.resize(pattern, shape) for hf_name, shape in specs[first : first + 40]
        }
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def main() -> None:
    """Start cold, then warm; exit with 3 if an answer differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="bundled", help="folder, or a name of benchmarks.step")
    parser.add_argument("--backend", choices=("auto", "portable", "sm90"), default="auto")
    parser.add_argument("--warm", type=int, default=3, help="starts with everything compiled")
    parser.add_argument("--out", help="write JSON rows here")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--began-s", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--cache-dir", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args)
        return
    if args.warm < 1:
        parser.error(f"--warm {args.warm} must be at least 1")
    with tempfile.TemporaryDirectory() as folder:
        model, is_folder = args.model, args.model == "bundled" or Path(args.model).is_dir()
        if not is_folder:
            try:
                model = write_random(args.model, Path(folder) / "model")
            except subprocess.CalledProcessError:
                parser.error(f"--model {args.model} is no folder, and none could be written of it")
        cache = os.path.join(folder, "programs")
        cold = start(args, model, cache)
        warm = [start(args, model, cache) for _ in range(args.warm)]
    _report(args, cold, warm)
    is_same = {run["digest"] for run in warm} == {cold["digest"]}
    print(f"all answers equal: {is_same}")
    sys.exit(0 if is_same else 3)


def _report(args: argparse.Namespace, cold: dict, warm: list[dict]) -> None:
    # WHY: after the last start, since JAX takes the GPU's memory.
    from benchmarks.common import Rows, environment
    from detjax.pallas_kernels.backend import Backend

    card = environment(Backend(cold["backend"])) | {"model": Path(args.model).name}
    rows = Rows(card, args.out)
    table = rich.table.Table("s since the start", "cold", "warm, median", "warm, all")
    for name in PHASES:
        values = [run[name] for run in warm]
        rows_of = ", ".join(f"{value:.2f}" for value in values)
        middle = statistics.median(values)
        table.add_row(name.removesuffix("_s"), f"{cold[name]:.2f}", f"{middle:.2f}", rows_of)
    for kind, run in (("cold", cold), *(("warm", run) for run in warm)):
        rows.keep(subject="start", kind=kind, **run)
    rich.console.Console().print(table)


if __name__ == "__main__":
    main()
