# SPDX-License-Identifier: Apache-2.0
"""A server of several processes, a GPU each, against one process: the same bits, and their times.

python -m benchmarks.serve_job --tp 2
python -m benchmarks.serve_job --tp 2 --layers 4

The same requests go to `python -m detjax.serve` in `dp * tp` processes, all at once, and to one
process with one GPU, one after the other. Some clients of the first leave. The model is the bundled
one, or with `--layers` one of random weights with the widths of Llama-3.1-8B. Without a GPU the
processes have a virtual CPU device each. The exit status is 3 if an answer differs, or if the job
does not end well when one of its processes is told to.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import rich.console
import rich.table
from safetensors.numpy import save_file

from benchmarks.common import Rows, environment
from benchmarks.http_client import HttpExchange, Plan, run_plans
from detjax.models.bundled import bundled_model_path
from detjax.models.hf_config import config_from_hf
from detjax.models.params import tensor_specs
from detjax.pallas_kernels.backend import Backend

MAX_LEN = 512
READY = re.compile(r"ready: http://([\d.]+):(\d+) serves (\S+)")
WIDTHS = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32768,
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "torch_dtype": "bfloat16", "eos_token_id": 1,
}  # fmt: skip


def write_random_model(folder: Path, num_layers: int) -> Path:
    """A checkpoint of random weights with the bundled tokenizer."""
    config = WIDTHS | {"num_hidden_layers": num_layers}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled_model_path() / name, folder)
    rng = np.random.default_rng(0)
    specs = jax.tree.leaves(tensor_specs(config_from_hf(config), tp=1, vocab_block=128))
    tensors = {spec.hf_name: _random_tensor(rng, spec.hf_name, spec.hf_shape) for spec in specs}
    save_file(tensors, folder / "model.safetensors")
    return folder


def _random_tensor(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Gains of norms are 1, weights of both signs and from 2**-7 to 2**-6, bfloat16."""
    if "norm" in name:
        return np.ones(shape, ml_dtypes.bfloat16)
    # WHY: of bits, as normal numbers of some GB take longer than the servers' start.
    bits = rng.integers(0, 1 << 16, shape, np.uint16)
    return ((bits & 0x807F) | 0x3C00).view(ml_dtypes.bfloat16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """One that is ready: its processes, where it listens, what it serves, how long it took.

    `fingerprint` is of numerics and build, which are the same for any mesh.
    """

    processes: list[subprocess.Popen]
    host: str
    port: int
    model: str
    fingerprint: str
    start_s: float


@contextlib.contextmanager
def started(args: argparse.Namespace, folder: Path, num_processes: int) -> Iterator[Server]:
    """A server in so many processes; their logs are printed if it does not become ready."""
    with socket.create_server(("localhost", 0)) as free:
        coordinator = f"localhost:{free.getsockname()[1]}"
    command = [
        sys.executable, "-m", "detjax.serve", "--model", str(folder), "--port", "0",
        "--max-len", str(MAX_LEN), "--batch-size", "16", "--decode-batches", "4", "--mode",
        args.mode,
    ]  # fmt: skip
    if num_processes > 1:
        command += ["--tp", str(args.tp), "--dp", str(args.dp), "--coordinator", coordinator,
                    "--num-processes", str(num_processes)]  # fmt: skip
    begin_s, processes = time.perf_counter(), []
    with contextlib.ExitStack() as stack:
        folder_of_logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        logs = [folder_of_logs / str(i) for i in range(num_processes)]
        for i, log in enumerate(logs):
            own = ["--process-id", str(i)] if num_processes > 1 else []
            file = stack.enter_context(log.open("w"))
            gpu = {"CUDA_VISIBLE_DEVICES": str(i)} if args.gpus else {"JAX_PLATFORMS": "cpu"}
            env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | gpu
            processes.append(subprocess.Popen([*command, *own], stdout=file, stderr=file, env=env))
            stack.callback(processes[-1].wait)
            stack.callback(processes[-1].kill)
        while (found := READY.search(logs[0].read_text())) is None:
            ended = any(process.poll() is not None for process in processes)
            if ended or time.perf_counter() - begin_s > args.ready_s:
                tails = "".join(f"--- process {i}\n{log.read_text()[-3000:]}\n"
                                for i, log in enumerate(logs))  # fmt: skip
                raise RuntimeError(f"not ready within {args.ready_s:g} s\n{tails}")
            time.sleep(0.05)
        start_s = time.perf_counter() - begin_s
        with urllib.request.urlopen(f"http://{found[1]}:{found[2]}/version", timeout=30) as answer:
            fingerprint = json.load(answer)["system_fingerprint"]
        yield Server(
            processes=processes, host=found[1], port=int(found[2]), model=found[3],
            fingerprint=fingerprint, start_s=start_s,
        )  # fmt: skip


def make_plans(num: int, vocab_size: int) -> list[Plan]:
    """Prompts of 1 to 300 random tokens and answers of 1 to 64, greedy and sampled; all at once."""
    rng = np.random.default_rng(1)
    return [
        Plan(at_s=0.02 * i, body={
            "prompt": rng.integers(2, vocab_size, int(rng.integers(1, 300))).tolist(),
            "max_tokens": int(rng.integers(1, 65)), "temperature": float(rng.choice([0.0, 0.8])),
            "seed": i, "stream": True, "stream_options": {"include_usage": True},
        })
        for i in range(num)
    ]  # fmt: skip


def ask(
    server: Server, plans: Sequence[Plan], *, in_turn: bool
) -> tuple[list[HttpExchange], float]:
    """The answers, and the seconds from the first request to the last event."""
    asked = [
        Plan(at_s=plan.at_s, body=plan.body | {"model": server.model},
             leaves_after=plan.leaves_after)
        for plan in plans
    ]  # fmt: skip
    found = run_plans(server.host, server.port, asked, in_turn=in_turn)
    ends_s = [one.pieces_s[-1] for one in found if one.pieces_s]
    if not ends_s:
        raise RuntimeError(f"no answer: {found[0].status} {found[0].error}")
    return found, max(ends_s) - min(one.asked_s for one in found)


def run(args: argparse.Namespace, folder: Path, rows: Rows) -> bool:
    """Both servers, and a row; whether all is as it should be."""
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    num_processes = args.tp * args.dp
    plans = make_plans(args.num, vocab_size)
    leaving = [Plan(at_s=p.at_s, body=p.body, leaves_after=i % 5) for i, p in enumerate(plans[::4])]
    with started(args, folder, num_processes) as job:
        found, job_s = ask(job, [*plans, *leaving], in_turn=False)
        job.processes[-1].send_signal(signal.SIGTERM)
        codes = [process.wait(30) for process in job.processes]
    with started(args, folder, 1) as one:
        alone, alone_s = ask(one, plans, in_turn=True)
    pairs = list(zip(found, alone, strict=False))
    wrong = sum(a.digest != b.digest for a, b in pairs)
    lost = sum(not a.digest or not b.digest for a, b in pairs)
    is_same = not (wrong or lost) and job.fingerprint == one.fingerprint
    rows.keep(
        subject="serve_job", mode=args.mode, tp=args.tp, dp=args.dp, processes=num_processes,
        requests=len(plans), left=len(leaving), same=is_same, wrong=wrong, lost=lost,
        fingerprints=[job.fingerprint, one.fingerprint],
        tokens=sum(one.num_tokens for one in alone), job_s=job_s, alone_s=alone_s,
        job_start_s=job.start_s, alone_start_s=one.start_s, exit_codes=codes,
    )  # fmt: skip
    return is_same and not any(codes)


def print_table(row: dict) -> None:
    """What was compared, and the times."""
    table = rich.table.Table("server", "start, s", "requests, s", "answers", "other bits", "lost")
    name = f"{row['processes']} processes, tp {row['tp']}, dp {row['dp']}, all at once"
    table.add_row(name, f"{row['job_start_s']:.1f}", f"{row['job_s']:.2f}", str(row["requests"]),
                  str(row["wrong"]), str(row["lost"]))  # fmt: skip
    table.add_row("1 process, one by one", f"{row['alone_start_s']:.1f}", f"{row['alone_s']:.2f}",
                  str(row["requests"]), "", "")  # fmt: skip
    rich.console.Console(width=120).print(table)
    print(f"exit codes after SIGTERM to the last process: {row['exit_codes']}")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--mode", choices=("invariant", "dvr"), default="invariant")
    parser.add_argument("--layers", type=int, default=0,
                        help="of a model of random weights; 0 is the bundled model")  # fmt: skip
    parser.add_argument("--num", type=int, default=48, help="requests")
    parser.add_argument("--ready-s", type=float, default=100.0, help="most that a start may take")
    parser.add_argument("--out", help="write JSON rows here")
    args = parser.parse_args(argv)
    if args.tp * args.dp < 2:
        parser.error(f"--tp {args.tp} --dp {args.dp} is one process; make it two or more")
    # WHY: not asked of JAX, which would take the GPUs' memory from the servers.
    args.gpus = shutil.which("nvidia-smi") is not None
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run both; 3 if they differ or the job ends badly."""
    args = parse_args(argv)
    jax.config.update("jax_platforms", "cpu")  # of this process: the servers have the GPUs
    card = environment(Backend.PORTABLE)
    card.pop("fingerprint")
    if args.gpus:
        names = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        card["gpu"] = names.stdout.partition("\n")[0]
    with tempfile.TemporaryDirectory() as scratch:
        folder = bundled_model_path()
        if args.layers:
            folder = write_random_model(Path(scratch) / "random", args.layers)
        name = f"llama3_8b widths, {args.layers} layers" if args.layers else folder.name
        rows = Rows(card | {"model": name}, args.out)
        good = run(args, folder, rows)
    print_table(rows.rows[-1])
    print("all answers have the same bits" if good else "FAILED")
    return 0 if good else 3


if __name__ == "__main__":
    sys.exit(main())
