# SPDX-License-Identifier: Apache-2.0
"""Faults around a server for a given time: every answer is the one of a quiet server, or an error.

    python tools/soak.py --seconds 60    # each fault once, however long it takes
    python tools/soak.py --seconds 3600 --rows soak.jsonl --report docs/soak.md  # then more, drawn

A server of the bundled model runs on this machine. Four clients ask it all the time, and faults
come one after the other: clients that die, do not read or do not finish, signals, damaged and full
caches, damaged model folders, processes that end at work, other weights, sleep, replays of receipts
on two devices, and a replica on Ray that is killed. What comes out is compared by digest. A line
tells of each fault as it ends; the terminal may go away.

Exit status 0 only if every digest was right, every fault was survived, and the server was well at
the end: nothing held, no self-check failed, and no more memory than `MAX_GROWTH_MIB` gained.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

ROOT = Path(__file__).resolve().parents[1]
BUNDLED = ROOT / "detjax" / "models" / "bundled" / "novels-6m"
FLEET = ROOT / "tests" / "ray" / "fleet.py"
ADMIN = {"Authorization": "Bearer soak"}
MAX_GROWTH_MIB = 400.0
NUM_CLIENTS = 64
"""Of a fault of clients, at once."""

PATIENCE_S = 300.0
PATIENT_RAY = {
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120", "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "120",
}  # fmt: skip
"""Ray replaces a proxy that does not answer within 5 s, which on busy cores it may not."""

PROMPT = "The old house by the sea"
GENERATE = ["-m", "detjax.generate", "--prompt", PROMPT, "--max-tokens", "8", "--format", "json"]
BODIES = [
    {
        "model": "novels-6m", "prompt": f"{PROMPT} {i}", "max_tokens": 8 + 5 * (i % 4), "seed": i,
        "temperature": (0.0, 0.9)[i % 2], "return_token_ids": True,
    }
    for i in range(12)
]  # fmt: skip

STREAMED = {"stream": True, "logprobs": 20}
"""Much to send for each token, so that a client that reads nothing holds the server up early."""

EXITS = """
import sys, threading, detjax
llm = detjax.LLM("bundled", max_len=256, batch_size=1, show_progress=False, cache_dir=sys.argv[1])
begun = threading.Event()
def work():
    while True:
        llm.generate("The old house", detjax.SamplingParams(max_tokens=64))
        begun.set()
threading.Thread(target=work, daemon=True).start()
begun.wait()
"""
ENGINES = """
import sys, threading, detjax
detjax.configure_virtual_devices(2)
def opened():
    return detjax.LLM("bundled", tp=2, max_len=256, batch_size=2, show_progress=False,
                      cache_dir=sys.argv[1], backend="portable")
llms, found = [opened(), opened()], [[], []]
def work(i):
    for _ in range(3):
        (out,) = llms[i].generate(sys.argv[2], detjax.SamplingParams(max_tokens=8))
        found[i].append(out.outputs[0].digest())
threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(*sorted({digest for one in found for digest in one}))
"""


class SoakError(AssertionError):
    """What should not have happened."""


class SkippedError(Exception):
    """Why a fault cannot come here."""


def expect(is_true: bool, said: str) -> None:
    """Raise what is said unless it holds."""
    if not is_true:
        raise SoakError(said)


def pick[T](of: Sequence[T], rng: np.random.Generator) -> T:
    """One of them."""
    return of[int(rng.integers(len(of)))]


def digests(response: httpx.Response) -> list[str]:
    """Of the choices of an answer."""
    expect(response.status_code == 200, f"{response.status_code}: {response.text[:300]}")
    return [choice["detjax"]["digest"] for choice in response.json()["choices"]]


def environment(**more: str) -> dict[str, str]:
    """Of every process: this tree, on the CPU."""
    return os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | more


class Server:
    """A process of `detjax.serve` on a free port."""

    def __init__(self, folder: Path, cache: Path):
        """Start it, and wait until it is ready."""
        self.log = folder / f"server-{time.monotonic_ns()}.log"
        command = [sys.executable, "-m", "detjax.serve", "--port", "0", "--no-compile",
                   "--max-len", "512", "--batch-size", "8", "--drain-timeout", "120",
                   "--cache-dir", str(cache), "--admin-api-key", "soak", "--weights-dir",
                   str(folder / "weights")]  # fmt: skip
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stderr=log, env=environment())
        self.url = self._wait()
        self.warm_mib = 0.0  # once its programs are compiled

    def _wait(self) -> str:
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s and self.process.poll() is None:
            found = re.search(r"ready: (http://127\.0\.0\.1:\d+)", self.log.read_text())
            if found:
                return found[1]
            time.sleep(0.2)
        raise SoakError(f"the server did not start: {self.log.read_text()[-2000:]}")

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def rss_mib(self) -> float:
        """Memory of the process; 0 where the system does not tell."""
        status = Path(f"/proc/{self.process.pid}/status")
        text = status.read_text() if status.exists() else ""
        found = re.search(r"VmRSS:\s+(\d+) kB", text)
        return int(found[1]) / 1024 if found else 0.0

    def num_files(self) -> int:
        """Open files and sockets of the process; 0 where the system does not tell."""
        folder = Path(f"/proc/{self.process.pid}/fd")
        return len(list(folder.iterdir())) if folder.exists() else 0


def weights_of(response: httpx.Response) -> str:
    """The hash of the weights that made an answer."""
    return response.json()["choices"][0]["detjax"]["weights"]


def write_weights(folder: Path) -> tuple[Path, Path]:
    """The weights of the bundled model, and others."""
    first, second = folder / "first", folder / "second"
    for one in (first, second):
        shutil.copytree(BUNDLED, one)
    tensors = load_file(second / "model.safetensors")
    norm = tensors["model.norm.weight"]
    tensors["model.norm.weight"] = (norm.astype(np.float32) * 0.5).astype(ml_dtypes.bfloat16)
    save_file(tensors, second / "model.safetensors")
    return first, second


@dataclass(slots=True)
class Count:
    """What became of a fault."""

    num_survived: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    skipped: str = ""
    seen: str = ""


class Soak:
    """A server, its load, and what was counted."""

    def __init__(
        self,
        folder: Path,
        rng: np.random.Generator,
        faults: Sequence["Fault"],
        *,
        tell: Callable[[dict[str, Any]], None],
    ):
        """Start the server and ask it everything while it is quiet, with either weights."""
        self.folder, self.rng, self.faults, self._tell = folder, rng, faults, tell
        self.cache = folder / "cache"
        self.weights = write_weights(folder / "weights")
        self.server = Server(folder, self.cache)
        self.counts = {fault.__name__: Count() for fault in faults}
        self.num_answers, self.num_refused, self.wrong = 0, 0, list[str]()
        self.wanted_of: dict[str, list[list[str]]] = {}
        self._ends, self._begin_s = threading.Event(), time.monotonic()
        self.wanted = self._learn()
        self.load_weights(self.weights[1])
        expect(self._learn() != self.wanted, "other weights answer alike")
        self.load_weights(self.weights[0])
        self.warm()
        self.generated = self.generate(cache=self.cache)[0]
        self._load = [threading.Thread(target=self._ask_on, args=(i,)) for i in range(4)]

    def _learn(self) -> list[list[str]]:
        """What a quiet server answers with the weights of now."""
        with self.client() as client:
            found = [client.post("/v1/completions", json=body) for body in BODIES]
        answers = [digests(response) for response in found]
        self.wanted_of[weights_of(found[0])] = answers
        return answers

    def warm(self) -> None:
        """Let the server compile what its faults need."""

        def ask(body: dict[str, Any]) -> None:
            with self.client() as client:
                digests(client.post("/v1/completions", json=body))

        # At once, so that batches are compiled, too; a stream's logprobs have a program of theirs.
        threads = [threading.Thread(target=ask, args=(body | {"logprobs": 20},)) for body in BODIES]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.server.warm_mib = self.server.rss_mib()

    def load_weights(self, folder: Path, **fields: Any) -> None:
        """Ask the server to take the weights of a folder."""
        response = self.administer("/update_weights_from_disk", model_path=str(folder), **fields)
        expect(response.status_code == 200, f"{response.status_code}: {response.text[:300]}")

    def administer(self, path: str, **fields: Any) -> httpx.Response:
        """Ask what an administrator may."""
        with self.client() as client:
            return client.post(path, json=fields, headers=ADMIN)

    def client(self) -> httpx.Client:
        """Of the server that runs now."""
        return httpx.Client(base_url=self.server.url, timeout=PATIENCE_S)

    def _ask_on(self, i: int) -> None:
        while not self._ends.is_set():
            i = (i + 1) % len(BODIES)
            try:
                with self.client() as client:
                    response = client.post("/v1/completions", json=BODIES[i])
            except httpx.HTTPError:
                self.num_refused += 1  # a server that is being replaced
                time.sleep(0.1)
                continue
            if response.status_code == 503:
                self.num_refused += 1
                continue
            self._compare(i, response)
            time.sleep(0.05)

    def _compare(self, i: int, response: httpx.Response) -> None:
        try:
            found = digests(response)
        except (SoakError, ValueError, KeyError) as error:
            self.wrong.append(f"body {i}: {error}")
            return
        self.num_answers += 1
        wanted = self.wanted_of.get(weights_of(response), [[]] * len(BODIES))[i]
        if found != wanted:
            self.wrong.append(f"body {i}: {found} instead of {wanted}")

    def ask(self) -> None:
        """One answer as a client gets it now, compared."""
        i = int(self.rng.integers(len(BODIES)))
        with self.client() as client:
            response = client.post("/v1/completions", json=BODIES[i])
        found = digests(response)
        wanted = self.wanted_of[weights_of(response)][i]
        expect(found == wanted, f"body {i}: {found} instead of {wanted}")

    def generate(
        self, *, cache: Path, model: Path | None = None, **more: str
    ) -> tuple[str, subprocess.CompletedProcess[str]]:
        """Run the command: the digest of its answer, or "", and how it ended."""
        before = [more["through"]] if "through" in more else []
        given = [*GENERATE, "--cache-dir", str(cache), *(["--model", str(model)] if model else [])]
        run = subprocess.run(
            [sys.executable, *before, *given], capture_output=True, text=True, env=environment(),
            timeout=PATIENCE_S, check=False, cwd=self.folder,
        )  # fmt: skip
        if run.returncode:
            return "", run
        return json.loads(run.stdout.splitlines()[-1])["completions"][0]["digest"], run

    def run(self, seconds: float) -> None:
        """Faults one after the other until the time is over and each has come once."""
        for thread in self._load:
            thread.start()
        until_s = time.monotonic() + seconds
        for fault in self.faults:
            self._meet(fault)
        while time.monotonic() < until_s:
            self._meet(pick(self.faults, self.rng))
        self._ends.set()
        for thread in self._load:
            thread.join()

    def _meet(self, fault: "Fault") -> None:
        count, begin_s = self.counts[fault.__name__], time.monotonic()
        result = "survived"
        try:
            count.seen = seen = fault(self)
            self.ask()
            count.num_survived += 1
        except SkippedError as error:
            result, seen = "skipped", str(error)
            count.skipped = seen
        except Exception as error:  # the report has it, and the next fault comes
            result, seen = "failed", f"{type(error).__name__}: {error}"
            count.failures.append(seen)
        count.seconds += time.monotonic() - begin_s
        self._tell({
            "fault": fault.__name__, "result": result, "seen": seen,
            "seconds": round(time.monotonic() - begin_s, 1),
            "after_s": round(self.age_s, 1), "answers": self.num_answers,
            "refused": self.num_refused, "wrong": len(self.wrong),
            "rss_mib": round(self.server.rss_mib()), "files": self.server.num_files(),
        })  # fmt: skip

    @property
    def age_s(self) -> float:
        """Seconds since the server was ready."""
        return time.monotonic() - self._begin_s

    def check_end(self) -> None:
        """See that the server is well: nothing held, no self-check failed, no memory lost."""
        with self.client() as client:
            health, until_s = client.get("/health"), time.monotonic() + 30
            expect(health.status_code == 200, f"health is {health.text}")
            names = ("detjax_pages_held", "detjax_http_requests_open", "detjax_http_requests_held",
                     "detjax_self_check_differences_total")  # fmt: skip
            held = dict.fromkeys(names, 1.0)
            while any(held.values()) and time.monotonic() < until_s:
                text = client.get("/metrics").text
                held = {n: float(re.findall(rf"^{n} (\S+)$", text, re.M)[0]) for n in names}
            expect(not any(held.values()), f"at the end {held}")
        growth_mib = self.server.rss_mib() - self.server.warm_mib
        expect(growth_mib < MAX_GROWTH_MIB, f"the server has {growth_mib:.0f} MiB more")

    def stop(self) -> None:
        """End the server; it drains."""
        self.server.process.send_signal(signal.SIGTERM)
        try:
            status = self.server.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.server.process.kill()
            raise SoakError("the server did not end") from None
        expect(status == 0, f"the server ended with status {status}")


# ------------------------------------------------------------------------------------- of clients


@contextlib.contextmanager
def sockets(soak: Soak, beginning: Callable[[int], bytes]) -> Iterator[list[socket.socket]]:
    """Connections that have sent something; closed at the end."""
    with contextlib.ExitStack() as held:
        made = []
        for i in range(NUM_CLIENTS):
            one = held.enter_context(socket.socket())
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.settimeout(PATIENCE_S)
            one.connect(soak.server.address)
            one.sendall(beginning(i))
            made.append(one)
        yield made


def streamed(i: int) -> bytes:
    """A request for a stream."""
    body = json.dumps(BODIES[i % len(BODIES)] | STREAMED).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def killed_clients(soak: Soak) -> str:
    """64 clients reset their connections in the middle of a stream."""
    with sockets(soak, streamed) as made:
        for one in made[:4]:
            one.recv(10)
        for one in made:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return f"{NUM_CLIENTS} connections reset during streams"


def half_open_sockets(soak: Soak) -> str:
    """64 clients send part of a request and nothing more, while others send requests."""
    parts = b"", b"POST /v1/comp", streamed(0)[:-40], b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03"
    with sockets(soak, lambda i: parts[i % len(parts)]):
        for _ in range(3):
            soak.ask()
    return f"{NUM_CLIENTS} requests stayed incomplete; 3 other requests were answered meanwhile"


def slow_readers(soak: Soak) -> str:
    """64 clients read nothing of their streams while others send requests, then read all of it."""
    with sockets(soak, streamed) as made:
        soak.ask()
        for i, one in enumerate(made):
            received = b""
            while b"data: [DONE]" not in received:
                part = one.recv(8192)
                expect(bool(part), f"stream {i} was cut after {received[-200:]!r}")
                received += part
            told = [d.decode() for d in re.findall(rb'"digest":"([0-9a-f]{64})"', received)]
            expect(told == soak.wanted[i % len(BODIES)], f"stream {i} says {told}")
    return f"{NUM_CLIENTS} streams read late: all complete, with the right digests"


# ------------------------------------------------------------------------------------- of processes


def stopped_server(soak: Soak) -> str:
    """The server gets SIGSTOP for 0.5 to 3 s, with requests running."""
    soak.server.process.send_signal(signal.SIGSTOP)
    try:
        time.sleep(soak.rng.uniform(0.5, 3.0))
    finally:
        soak.server.process.send_signal(signal.SIGCONT)
    soak.ask()
    return "after SIGCONT it answered all requests"


def replaced_server(soak: Soak) -> str:
    """SIGTERM under load, then a new server with the same cache of compiled programs."""
    soak.stop()
    soak.server = Server(soak.folder, soak.cache)
    soak.warm()
    return "the server drained and exited with 0; the next one gave the same answers"


def exit_at_work(soak: Soak) -> str:
    """The Python interpreter exits while a thread generates."""
    run = subprocess.run(
        [sys.executable, "-c", EXITS, str(soak.cache)], capture_output=True, text=True,
        env=environment(), timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    expect(run.returncode == 0, f"status {run.returncode}: {run.stderr[-500:]}")
    return "exit status 0"


def several_engines(soak: Soak) -> str:
    """Two engines in one process, on the same two devices."""
    run = subprocess.run(
        [sys.executable, "-c", ENGINES, str(soak.cache), PROMPT], capture_output=True, text=True,
        env=environment(), timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    expect(run.returncode == 0, f"status {run.returncode}: {run.stderr[-500:]}")
    expect(run.stdout.split() == [soak.generated], f"{run.stdout} instead of {soak.generated}")
    return "6 answers of the two engines had one digest"


# ----------------------------------------------------------------------------------------- of files


def damaged_cache(soak: Soak) -> str:
    """Cached programs are changed in a bit, cut short, emptied, or made folders or links."""
    files = [file for file in soak.cache.rglob("*-cache") if file.is_file()]
    for i in soak.rng.permutation(len(files))[:6]:
        damage(files[i], soak.rng)
    found, run = soak.generate(cache=soak.cache)
    expect(found == soak.generated, f"{found} instead of {soak.generated}: {run.stderr[-500:]}")
    return f"{min(6, len(files))} of {len(files)} entries damaged; the answer was the same"


def concurrent_writers(soak: Soak) -> str:
    """Two processes fill one new cache of compiled programs at once."""
    with tempfile.TemporaryDirectory(dir=soak.folder) as cache:
        given = [sys.executable, *GENERATE, "--cache-dir", cache]
        running = [
            subprocess.Popen(given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                             env=environment())
            for _ in range(2)
        ]  # fmt: skip
        for process in running:
            out, errors = process.communicate(timeout=PATIENCE_S)
            expect(process.returncode == 0, f"status {process.returncode}: {errors[-500:]}")
            found = json.loads(out.splitlines()[-1])["completions"][0]["digest"]
            expect(found == soak.generated, f"{found} instead of {soak.generated}")
        found, _ = soak.generate(cache=Path(cache))
        expect(found == soak.generated, f"from the cache {found} instead of {soak.generated}")
        left = [str(file) for file in Path(cache).rglob("tmp*")]
        expect(not left, f"left over: {left}")
    return "two writers and a reader had one digest; no temporary file was left"


FULL = """
import resource, runpy, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (NUM_BYTES, NUM_BYTES))
sys.argv = sys.argv[2:]
runpy.run_module("detjax.generate", run_name="__main__")
"""


def full_disk(soak: Soak) -> str:
    """The size of files is limited to 0, 100 or 65,536 bytes, so no program can be cached."""
    script = soak.folder / "full.py"
    script.write_text(FULL.replace("NUM_BYTES", str(pick((0, 100, 65536), soak.rng))))
    with tempfile.TemporaryDirectory(dir=soak.folder) as cache:
        found, run = soak.generate(cache=Path(cache), through=str(script))
        expect(found == soak.generated, f"{found} instead of {soak.generated}: {run.stderr[-500:]}")
        left = [str(file) for file in Path(cache).rglob("tmp*")]
        expect(not left, f"left over: {left}")
    return "no program was cached; the answer was the same"


def damaged_folder(soak: Soak) -> str:
    """A file of the model is cut, empty, missing or zeros: an error, or the same answer."""
    with tempfile.TemporaryDirectory(dir=soak.folder) as copy:
        folder = Path(copy) / "model"
        shutil.copytree(BUNDLED, folder)
        file = pick(sorted(file for file in folder.iterdir() if file.is_file()), soak.rng)
        how = pick(("cut", "empty", "missing", "zeros"), soak.rng)
        held = file.read_bytes()
        if how == "missing":
            file.unlink()
        else:
            length = {"cut": len(held) // 2, "empty": 0, "zeros": len(held)}[how]
            file.write_bytes(bytes(length) if how == "zeros" else held[:length])
        found, run = soak.generate(cache=soak.cache, model=folder)
        said = f"{file.name} {how}: status {run.returncode}, {run.stderr[-500:]}"
        expect("Traceback" not in run.stderr, said)
        expect(bool(found) or run.returncode == 2, said)
    return f"{file.name} {how}: " + ("the same answer" if found else "error reported")


def damage(file: Path, rng: np.random.Generator) -> None:
    """Make something else of a file."""
    held = file.read_bytes()
    how = pick(("byte", "cut", "empty", "folder", "link"), rng)
    file.unlink()
    if how == "folder":
        file.mkdir(mode=0o700)
    elif how == "link":
        file.symlink_to("/dev/zero")
    elif how == "byte" and held:
        at = int(rng.integers(len(held)))
        file.write_bytes(held[:at] + bytes([held[at] ^ 1 << int(rng.integers(8))]) + held[at + 1 :])
    else:
        file.write_bytes(held[: len(held) // 2] if how == "cut" else b"")


# ---------------------------------------------------------------------- of weights, meshes, fleets


def replaced_weights(soak: Soak) -> str:
    """Other weights are loaded under load, then damaged ones, then the first ones again."""
    mode = pick(("wait", "abort"), soak.rng)
    try:
        soak.load_weights(soak.weights[1], mode=mode)
        with soak.client() as client:
            found = digests(client.post("/v1/completions", json=BODIES[0]))
        expect(found != soak.wanted[0], "the weights of before answer")
        with tempfile.TemporaryDirectory(dir=soak.weights[0].parent) as copy:
            folder = Path(copy) / "cut"
            shutil.copytree(soak.weights[0], folder)
            file = folder / "model.safetensors"
            file.write_bytes(file.read_bytes()[: int(soak.rng.integers(file.stat().st_size))])
            refused = soak.administer("/update_weights_from_disk", model_path=str(folder))
            expect(refused.status_code == 400, f"{refused.status_code}: {refused.text[:300]}")
        soak.ask()
    finally:
        soak.load_weights(soak.weights[0], mode="wait")
    return f"mode {mode}: each answer is from one set of weights; a file cut short is refused"


def sleeping_server(soak: Soak) -> str:
    """`POST /sleep` and `/wake_up` under load: weights and cache leave the device and return."""
    mode = pick(("wait", "abort"), soak.rng)
    slept = soak.administer("/sleep", level=1, mode=mode)
    expect(slept.status_code == 200, slept.text[:300])
    try:
        time.sleep(soak.rng.uniform(0.1, 1.0))
        with soak.client() as client:
            held = float(
                re.findall(r"^detjax_http_requests_held (\S+)$", client.get("/metrics").text, re.M)[
                    0
                ]
            )
    finally:
        woken = soak.administer("/wake_up")
        expect(woken.status_code == 200, woken.text[:300])
    return f"mode {mode}: {held:.0f} requests waited and were answered"


def replayed_receipts(soak: Soak) -> str:
    """Receipts of answers under load are replayed on two devices; a changed one must fail."""
    with soak.client() as client:
        told = [client.post("/v1/completions", json=b | {"receipt": True}) for b in BODIES]
    lines = [one.json()["choices"][0]["detjax"]["receipt"] for one in told]
    path = soak.folder / "receipts.jsonl"

    def replay(receipts: list[str]) -> subprocess.CompletedProcess[str]:
        path.write_text("".join(line + "\n" for line in receipts))
        return subprocess.run(
            [sys.executable, "-m", "detjax.replay", str(path), "--tp", "2", "--batch-size", "3",
             "--cache-dir", str(soak.cache)],
            capture_output=True, text=True, env=environment(), timeout=PATIENCE_S, check=False,
        )  # fmt: skip

    run = replay(lines)
    expect(run.returncode == 0, f"status {run.returncode}: {run.stderr[-500:]}")
    expect(f"replayed {len(lines)} receipts" in run.stdout, run.stdout[-500:])
    digest = json.loads(lines[-1])["answer"]["digest"]
    changed = lines[-1].replace(digest, digest[::-1])
    expect(replay([*lines[:-1], changed]).returncode != 0, "a changed receipt was accepted")
    return f"{len(lines)} receipts replayed at tp 2 with the same bits; the changed receipt failed"


def killed_replica(soak: Soak) -> str:
    """One of two replicas on Ray is killed during streams; clients send the requests again."""
    if importlib.util.find_spec("ray") is None:
        raise SkippedError("ray is not installed")
    rows = [body | {"max_tokens": 200, "ignore_eos": True} for body in BODIES]
    with soak.client() as client:
        wanted = [digests(client.post("/v1/completions", json=row)) for row in rows]
    options = {"model": "novels-6m", "gpus": 0, "num_replicas": 2, "cache_dir": str(soak.cache)}
    asked = {"part": "streams", "rows": rows, "options": options}
    run = subprocess.run(
        [sys.executable, str(FLEET), json.dumps(asked)], capture_output=True, text=True,
        env=environment(**PATIENT_RAY), timeout=3 * PATIENCE_S, check=False,
    )  # fmt: skip
    expect(run.returncode == 0, f"status {run.returncode}: {run.stderr[-1000:]}")
    said = json.loads(run.stdout.splitlines()[-1])
    found = [[row["digest"]] for row in said["found"]]
    expect(len(said["killed"]) == 1, f"{said['killed']} were killed")
    expect(found == wanted, f"{found} instead of {wanted}")
    num_cut = sum(num_tokens > 0 for row in said["found"] for num_tokens in row["cut"])
    expect(num_cut > 0, "no stream was cut")
    return (
        f"{len(rows)} streams, cut {num_cut} times and sent again: the digests of the single server"
    )


type Fault = Callable[[Soak], str]

FAULTS: tuple[Fault, ...] = (
    killed_clients, half_open_sockets, stopped_server, slow_readers, damaged_folder, damaged_cache,
    replaced_weights, sleeping_server, exit_at_work, replayed_receipts, replaced_server,
    several_engines, full_disk, concurrent_writers, killed_replica,
)  # fmt: skip
"""The short ones first: the first round meets them in this order."""


# ------------------------------------------------------------------------------------------ report


def card(seconds: float, seed: int) -> dict[str, Any]:
    """Where and how: the first row."""
    return {
        "soak": "tools/soak.py", "date": time.strftime("%Y-%m-%d"), "machine": platform.machine(),
        "cores": os.cpu_count(), "seconds": seconds, "seed": seed,
    }  # fmt: skip


def report(soak: Soak, told: dict[str, Any], failures: Sequence[str]) -> str:
    """What happened, as a page."""
    lines = [
        "# Faults around a server",
        "",
        f"`python tools/soak.py --seconds {told['seconds']:.0f} --seed {told['seed']}` on "
        f"{told['date']}: {told['machine']}, {told['cores']} cores, {told['after_s']:.0f} s. It "
        "serves the bundled model and injects the faults below, one after the other. Four clients "
        "send requests all the time and compare the digest of each answer with that of a server "
        "without faults.",
        "",
        f"- {soak.num_answers} answers during the faults, {len(soak.wrong)} wrong. "
        f"{soak.num_refused} requests were refused, because the server was replaced or paused.",
        f"- Memory of the last server: {told['warm_mib']:.0f} MiB after compilation, "
        f"{told['end_mib']:.0f} MiB at the end; {told['files']} open files.",
        f"- {'Every fault was survived.' if not failures else 'Failures: see below.'}",
        "",
        "| fault | what it does | times | survived | seconds each | result of the last one |",
        "|---|---|---|---|---|---|",
    ]
    for fault in soak.faults:
        count, what = soak.counts[fault.__name__], (fault.__doc__ or "").rstrip(".")
        times = count.num_survived + len(count.failures)
        each = count.seconds / max(times, 1)
        seen = f"skipped: {count.skipped}" if count.skipped else count.seen
        cells = f"`{fault.__name__}`", what, times, count.num_survived, f"{each:.1f}", seen
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", *(f"- {text}" for text in failures)]
    return "\n".join(lines).rstrip() + "\n"


def failures_of(soak: Soak) -> list[str]:
    """What did not hold."""
    found = [f"{name}: {text}" for name, count in soak.counts.items() for text in count.failures]
    found += [f"wrong: {text}" for text in soak.wrong[:20]]
    return found if soak.num_answers else [*found, "nobody was answered"]


def say(text: str) -> None:
    """Print, unless the terminal has gone."""
    with contextlib.suppress(OSError, ValueError):
        print(text, flush=True)


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    names = [fault.__name__ for fault in FAULTS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3600.0, help="least time that faults come")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="FAULT",
                        help="which; all by default: %(choices)s")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of their order and kinds")
    parser.add_argument("--rows", type=Path, help="a file for a row of JSON of each fault")
    parser.add_argument("--report", type=Path, help="a file for the report, Markdown")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run it; the exit status."""
    args = make_parser().parse_args(arguments)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # WHY: an hour is longer than a terminal
    told = card(args.seconds, args.seed)

    def tell(row: dict[str, Any]) -> None:
        if args.rows is not None:
            with args.rows.open("a") as rows:
                rows.write(json.dumps(row) + "\n")
        if "fault" in row:
            say(
                f"{row['after_s']:.0f} of {args.seconds:.0f} s: {row['fault']} {row['result']} in "
                f"{row['seconds']} s ({row['seen']}); "
                f"{row['answers']} answers, {row['wrong']} wrong"
            )

    if args.rows is not None:
        args.rows.unlink(missing_ok=True)
    tell(told)
    with tempfile.TemporaryDirectory(prefix="detjax_soak_") as folder:
        faults = [fault for fault in FAULTS if fault.__name__ in args.only]
        soak = Soak(Path(folder), np.random.default_rng(args.seed), faults, tell=tell)
        try:
            soak.run(args.seconds)
            ends = error_of(soak.check_end)
            told["warm_mib"], told["end_mib"] = soak.server.warm_mib, soak.server.rss_mib()
            told["files"] = soak.server.num_files()
            ends += error_of(soak.stop)
        finally:
            soak.server.process.kill()
    failures = failures_of(soak) + ends
    told["after_s"] = soak.age_s
    tell({"failures": failures} | told)
    text = report(soak, told, failures)
    say(text)
    if args.report is not None:
        args.report.write_text(text)
    return 1 if failures else 0


def error_of(check: Callable[[], None]) -> list[str]:
    """What a check says that does not hold."""
    try:
        check()
    except Exception as error:  # the report has it
        return [f"the end: {type(error).__name__}: {error}"]
    return []


if __name__ == "__main__":
    sys.exit(main())
