# SPDX-License-Identifier: Apache-2.0
"""detjax, vLLM and SGLang as whole engines: one run, one machine, one protocol, the same prompts.

python -m benchmarks.peers --gpus 2 --vllm-path /tmp/vllm --out rows.jsonl
python -m benchmarks.peers --engines detjax-bfloat16 vllm --measure decode --out rows.jsonl
python -m benchmarks.peers --engines detjax-bfloat16 --model tiny --backend portable

Each engine has a process and a GPU of its own, Llama-3.1-8B shapes, random weights, 256 slots and
no prefix cache. All continue the same prompts of random tokens greedily, through their own
`generate`. A decode step is (time of 130 tokens less the least of two times of 2) / 128, after
prompts of 1000 tokens. Prefill is the least of three calls with 4000 tokens. The offline run is 512
requests of 512 + 128 tokens. The throughput run, which `--measure` must name, is as many of 1000 +
1000. With `--gpus N` N engines are opened side by side, and measured side by side once all of them
are ready; a row names its GPU and what was measured beside it. A row is printed and appended to
`--out` as soon as its engine is done. The row of an engine that fails has the error and the end of
its log. Exit status 3 if one failed.
"""

import argparse
import contextlib
import importlib.machinery
import importlib.metadata
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rich.console
import rich.table

from benchmarks.common import output_of
from benchmarks.peer_engine import GO, KINDS, MEASURES, READY, ROW, SIZES
from benchmarks.start import write_random

STDERR = rich.console.Console(stderr=True)
VLLM = "0.26.0"
"""The version whose bundle `benchmarks.peers_bundle` makes."""

VERSIONS = {"vllm": VLLM, "sglang": "0.5.13.post1"}
DEFAULT_ENGINES = [
    name
    for name, kind in KINDS.items()
    if kind.package != "sglang" and name not in ("vllm-fp8-per-channel", "detjax-int8-fp8-cache")
]
LOG_LINES, LOG_CHARS = 12, 1500
TOLD = ("attention backend", "Selected ", "max_num_batched_tokens", "KV cache size")
"""What a log says of the choices that an engine has made."""


@dataclass(kw_only=True, slots=True)
class Worker:
    """A process of `benchmarks.peer_engine`.

    Attributes:
        name: Of its engine.
        gpu_idx: The GPU that it sees, of this host.
        process: Leads a process group, which ends with it.
        files: Where ready, go, row and log lie.
        began_s: When it was started, and then when it was told to measure; of `time.monotonic`.
        beside: Engines that are measured at the same time.
        is_told: Whether it has been told to measure.
    """

    name: str
    gpu_idx: int
    process: subprocess.Popen
    files: Path
    began_s: float
    beside: list[str] = field(default_factory=list)
    is_told: bool = False

    @classmethod
    def start(cls, name: str, gpu_idx: int, args: argparse.Namespace) -> "Worker":
        """Start an engine on a GPU."""
        kind = KINDS[name]
        files = Path(args.folder) / "logs" / f"{name}-{time.time_ns()}"
        files.mkdir(parents=True)
        environment = os.environ | {
            "CUDA_VISIBLE_DEVICES": visible_gpu(gpu_idx),
            "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1", **kind.environment,
            # WHY: 75 % of an H100, JAX's default, have no room for 256 sequences of 1130 tokens
            # beside weights of bfloat16. vLLM takes 92 %.
            "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9",
        }  # fmt: skip
        paths = [search_path(kind.package, args), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        command = [
            sys.executable, "-m", "benchmarks.peer_engine", "--engine", name, "--model", args.model,
            "--backend", args.backend, "--folder", args.folder, "--files", str(files),
            "--measure", *args.measure,
        ]  # fmt: skip
        with open(files / "log", "wb") as log:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        return cls(
            name=name, gpu_idx=gpu_idx, process=process, files=files, began_s=time.monotonic()
        )

    @property
    def is_ready(self) -> bool:
        """Whether its engine is open."""
        return (self.files / READY).exists()

    def go(self, beside: list[str]) -> None:
        """Let it measure."""
        self.beside, self.is_told, self.began_s = beside, True, time.monotonic()
        (self.files / GO).touch()

    def result(self, limit_s: float) -> dict[str, Any] | None:
        """What it measured, or why it did not; None while it is at work."""
        code = self.process.poll()
        took_s = time.monotonic() - self.began_s
        if (self.files / ROW).exists():
            return json.loads((self.files / ROW).read_text()) | self._chosen()
        if code is not None:
            return self._failed(f"its process has ended with exit status {code}")
        is_waiting = self.is_ready and not self.is_told
        if took_s > limit_s and not is_waiting:
            when = "measured" if self.is_told else "was opened"
            return self._failed(f"stopped after {took_s:.0f} s, while it {when}: --limit-s")
        return None

    def _log(self) -> list[str]:
        return (self.files / "log").read_text(errors="replace").splitlines()

    def _chosen(self) -> dict[str, list[str]]:
        lines = (line.rpartition("] ")[2] for line in self._log() if any(s in line for s in TOLD))
        return {"chosen": list(dict.fromkeys(lines))}

    def _failed(self, error: str) -> dict[str, Any]:
        return {"error": error, "log": "\n".join(self._log()[-LOG_LINES:])[-LOG_CHARS:]}

    def end(self) -> None:
        """End its processes, so that the GPU's memory is free."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for _ in range(100):  # until those that it has started have ended too
            try:
                os.killpg(self.process.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.1)


def visible_gpu(gpu_idx: int) -> str:
    """What CUDA_VISIBLE_DEVICES says of a GPU that this process sees as `gpu_idx`."""
    visible = [it for it in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if it]
    return visible[gpu_idx] if visible else str(gpu_idx)


def search_path(package: str, args: argparse.Namespace) -> str:
    """Where an engine is imported from before all else; empty for what Python finds."""
    return {"vllm": args.vllm_path, "sglang": args.sglang_path}.get(package, "")


def run_side_by_side(
    names: Sequence[str], args: argparse.Namespace
) -> Iterator[tuple[Worker, dict[str, Any]]]:
    """Open engines, one a GPU; once all are open, measure; what came of each as it ends."""
    working = [Worker.start(name, gpu_idx, args) for gpu_idx, name in enumerate(names)]
    try:
        while working:
            for worker in tuple(working):
                found = worker.result(args.limit_s)
                if found is not None:
                    worker.end()
                    working.remove(worker)
                    yield worker, found
            if all(worker.is_ready for worker in working):
                for worker in working:
                    if not worker.is_told:
                        worker.go([one.name for one in working if one is not worker])
            time.sleep(0.05)
    finally:
        for worker in working:
            worker.end()


def card(args: argparse.Namespace) -> dict[str, str]:
    """What every row says of the machine; JAX is not started here, as it would take a GPU."""
    ask = ("nvidia-smi", "-i", "0", "--format=csv,noheader")
    has_gpu = args.backend == "sm90"
    return {
        "gpu": output_of(*ask, "--query-gpu=name") if has_gpu else "cpu",
        "driver": output_of(*ask, "--query-gpu=driver_version") if has_gpu else "none",
        "jax": importlib.metadata.version("jax"),
        "commit": output_of("git", "describe", "--always", "--dirty=+"),
        "model": f"{args.model} shapes, random weights",
        "date": time.strftime("%Y-%m-%d"),
    }


def row_of(worker: Worker, found: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """A row, but for the card."""
    sizes = SIZES[args.model]
    return {
        "subject": "engine",
        "name": worker.name,
        "engine": KINDS[worker.name].title,
        "gpu_idx": worker.gpu_idx,
        "gpus": args.gpus,
        "beside": worker.beside,
        "slots": sizes.slots,
        "max_len": sizes.max_len,
    } | found


def keep(row: dict[str, Any], out: str | None) -> None:
    """Print a row, and append it to a file."""
    line = json.dumps(row)
    print(line, flush=True)
    if out:
        with open(out, "a") as file:
            file.write(line + "\n")


def show(rows: list[dict[str, Any]]) -> None:
    """A table of the rows."""
    table = rich.table.Table("engine", "GPU", "start, s", "decode, ms", "prefill, ms", "offline, s")
    for row in rows:
        if "error" in row:
            table.add_row(row["name"], str(row["gpu_idx"]), row["error"])
            continue
        steps = ", ".join(f"{n}: {ms:.2f}" for n, ms in row.get("decode_ms", {}).items())
        prefill, offline = (
            next((f"{v:.2f}" for k, v in row.items() if k.startswith(s) and k.endswith(e)), "")
            for s, e in (("prefill_", "_ms"), ("offline_", "_s"))
        )
        table.add_row(
            row["name"], str(row["gpu_idx"]), f"{row['start_s']:.0f}", steps, prefill, offline
        )
    STDERR.print(table)


def make_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--engines", nargs="+", choices=list(KINDS), default=DEFAULT_ENGINES,
                        help="in this order")  # fmt: skip
    parser.add_argument("--measure", nargs="+", choices=MEASURES, default=list(MEASURES[:3]))
    parser.add_argument("--gpus", type=int, default=1, help="engines side by side, one a GPU")
    parser.add_argument(
        "--vllm-path", default="", help="folder to import vLLM from, if not Python's"
    )
    parser.add_argument("--sglang-path", default="", help="likewise; may be several folders")
    parser.add_argument("--model", choices=list(SIZES), default="llama3_8b")
    parser.add_argument("--backend", default="sm90", help="of detjax")
    parser.add_argument(
        "--folder", default="/tmp/peers-models", help="of weights, programs and logs, kept"
    )
    parser.add_argument(
        "--limit-s",
        type=float,
        default=200,
        help="seconds in which an engine opens, and again in which it is measured",
    )
    parser.add_argument("--out", help="append JSON rows here")
    return parser


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse what cannot run."""
    if args.gpus < 1:
        parser.error(f"--gpus {args.gpus} must be at least 1")
    for package, version in VERSIONS.items():
        names = [name for name in args.engines if KINDS[name].package == package]
        path = search_path(package, args)
        places = path.split(os.pathsep) if path else None
        if names and importlib.machinery.PathFinder.find_spec(package, places) is None:
            parser.error(
                f"--engines {' '.join(names)} need {package}, which is not in "
                f"{path or 'this Python'}: install {package}=={version}, or give --{package}-path "
                "a folder that has it (docs/benchmarks.md says how), or name other engines"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each engine; 3 if one failed."""
    parser = make_parser()
    args = parser.parse_args(argv)
    check(parser, args)
    folder = Path(args.folder) / args.model
    args.folder = str(folder)
    if not (folder / "bfloat16").exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"bfloat16.part-{os.getpid()}"
        write_random(args.model, part)
        part.rename(folder / "bfloat16")
    of_run = card(args)
    rows: list[dict[str, Any]] = []
    for names in itertools.batched(args.engines, args.gpus):
        for worker, found in run_side_by_side(names, args):
            is_ours = KINDS[worker.name].package == "detjax"
            version = {"version": of_run["commit"]} if is_ours else {}
            rows.append(row_of(worker, found, args) | version | of_run)
            keep(rows[-1], args.out)
    show(rows)
    return 3 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
