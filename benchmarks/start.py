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
import concurrent.futures
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import rich.console
import rich.progress
import rich.table

PHASES = ("imported_s", "loaded_s", "first_token_s", "answered_s", "compiled_s")
"""Seconds since the process was started: the end of each phase."""
NUM_TOKENS = 32
PROMPT = "The old house by the sea"
STDERR = rich.console.Console(stderr=True)


def measure(args: argparse.Namespace) -> None:
    """What a started process does; prints one line of JSON."""
    import detjax

    found: dict[str, float | str | int] = {"imported_s": time.time() - args.began_s}
    llm = detjax.LLM(
        args.model, backend=args.backend, tp=args.tp, show_progress=False, cache_dir=args.cache_dir
    )
    found["loaded_s"] = time.time() - args.began_s
    llm.generate(PROMPT, detjax.SamplingParams(max_tokens=1))
    found["first_token_s"] = time.time() - args.began_s
    answer = llm.generate(PROMPT, detjax.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
    found["answered_s"] = time.time() - args.began_s
    llm.engine.compile()
    found["compiled_s"] = time.time() - args.began_s
    stats = llm.engine.stats()
    # WHY: not above, so that a start imports what a user's does.
    from benchmarks.common import environment

    card = environment(llm.config.backend)
    found |= {
        "digest": answer[0].outputs[0].digest(),
        "backend": llm.config.backend.value,
        "programs": len(list(llm.engine.programs)),
        "compile_s": stats.compile_s,
        "self_check_s": stats.self_check_s,
    }
    print(json.dumps({"found": found, "card": card}), flush=True)


def start(args: argparse.Namespace, model: str, cache_dir: str) -> dict:
    """Start a process and return what it found, and the card of where it ran."""
    began_s = time.time()
    run = subprocess.run(
        [
            sys.executable, "-m", "benchmarks.start", "--measure", "--began-s", repr(began_s),
            "--model", model, "--backend", args.backend, "--tp", str(args.tp),
            "--cache-dir", cache_dir,
        ],
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return json.loads(run.stdout.strip().rpartition("\n")[2])


def write_random(name: str, folder: Path, num_layers: int = 0) -> str:
    """Write a folder of a configuration with random weights, in a process of its own.

    `num_layers` is as `write_folder` has it.
    """
    program = (
        "import sys, pathlib; from benchmarks.start import write_folder; "
        "write_folder(sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3]))"
    )
    command = [sys.executable, "-c", program, name, str(folder), str(num_layers)]
    subprocess.run(command, check=True)
    return str(folder)


def write_folder(name: str, folder: Path, num_layers: int = 0) -> None:
    """As Hugging Face has it, with a tokenizer of bytes; the weights are of one small pattern.

    Args:
        name: Of `benchmarks.step.MODELS`.
        folder: Is made.
        num_layers: The first so many alone; 0 is all.

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
    config = dataclasses.replace(config, num_layers=num_layers or config.num_layers)
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
    weight_map = {name: f"model-{i // 40:05d}.safetensors" for i, (name, _) in enumerate(specs)}

    def save(first: int) -> None:
        batch = specs[first : first + 40]
        tensors = {name: np.resize(pattern, shape) for name, shape in batch}
        save_file(tensors, folder / weight_map[batch[0][0]])

    firsts = range(0, len(specs), 40)
    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        saved = pool.map(save, firsts)
        deque(rich.progress.track(saved, "weights", len(firsts), console=STDERR), maxlen=0)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def main() -> None:
    """Start cold, then warm; exit with 3 if an answer differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="bundled", help="folder, or a name of benchmarks.step")
    parser.add_argument("--backend", choices=("auto", "portable", "sm90"), default="auto")
    parser.add_argument("--tp", type=int, default=1, help="devices that share the model")
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
        # WHY: not above, so that a start imports what a user's does.
        from benchmarks.common import Rows

        rows, found = None, []
        for kind in ("cold", *["warm"] * args.warm):
            run = start(args, model, cache)
            if rows is None:
                rows = Rows(run["card"] | {"model": Path(args.model).name, "tp": args.tp}, args.out)
            rows.keep(subject="start", kind=kind, **run["found"])
            found.append(run["found"])
    _print_table(found)
    is_same = len({run["digest"] for run in found}) == 1
    print(f"all answers equal: {is_same}")
    sys.exit(0 if is_same else 3)


def _print_table(found: list[dict]) -> None:
    cold, *warm = found
    table = rich.table.Table("s since the start", "cold", "warm, median", "warm, all")
    for name in PHASES:
        values = [run[name] for run in warm]
        middle = statistics.median(values)
        listed = ", ".join(f"{value:.2f}" for value in values)
        table.add_row(name.removesuffix("_s"), f"{cold[name]:.2f}", f"{middle:.2f}", listed)
    rich.console.Console().print(table)


if __name__ == "__main__":
    main()
