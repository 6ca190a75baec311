# SPDX-License-Identifier: Apache-2.0
"""Faults around a server for a given time: every answer is the one of a quiet server, or an error.

    python tools/soak.py --seconds 60                     # each fault once, however long it takes
    python tools/soak.py --seconds 3600 --report soak.md  # then more, drawn

A server of the bundled model runs on this machine. Four clients ask it all the time, and faults
come one after the other: clients that die, do not read or do not finish, signals, damaged and full
caches, damaged model folders, processes that end at work. What comes out is compared by digest.
Exit status 1 if a digest differs, a fault is not survived, or the server is not well at the end.
"""

import argparse
import contextlib
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

import httpx
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
BUNDLED = ROOT / "detjax" / "models" / "bundled" / "novels-6m"
NUM_CLIENTS = 64
"""Of a fault of clients, at once."""

PATIENCE_S = 300.0
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
                   "--cache-dir", str(cache)]  # fmt: skip
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stderr=log, env=environment())
        self.url = self._wait()

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


@dataclass(slots=True)
class Count:
    """What became of a fault."""

    num_survived: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


class Soak:
    """A server, its load, and what was counted."""

    def __init__(self, folder: Path, rng: np.random.Generator, faults: Sequence["Fault"]):
        """Start the server and ask it everything while it is quiet."""
        self.folder, self.rng, self.faults = folder, rng, faults
        self.cache = folder / "cache"
        self.server = Server(folder, self.cache)
        self.counts = {fault.__name__: Count() for fault in faults}
        self.num_answers, self.num_refused, self.wrong = 0, 0, list[str]()
        self._ends = threading.Event()
        with self.client() as client:
            self.wanted = [digests(client.post("/v1/completions", json=b)) for b in BODIES]
            client.post("/v1/completions", json=BODIES[0] | STREAMED)  # its programs, too
        self.generated = self.generate(cache=self.cache)[0]
        self._load = [threading.Thread(target=self._ask_on, args=(i,)) for i in range(4)]

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
        if found != self.wanted[i]:
            self.wrong.append(f"body {i}: {found} instead of {self.wanted[i]}")

    def ask(self) -> None:
        """One answer as a client gets it now, compared."""
        i = int(self.rng.integers(len(BODIES)))
        with self.client() as client:
            found = digests(client.post("/v1/completions", json=BODIES[i]))
        expect(found == self.wanted[i], f"body {i}: {found} instead of {self.wanted[i]}")

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
        try:
            fault(self)
            self.ask()
            count.num_survived += 1
        except Exception as error:  # the report has it, and the next fault comes
            count.failures.append(f"{type(error).__name__}: {error}")
        count.seconds += time.monotonic() - begin_s
        print(f"{fault.__name__}: {time.monotonic() - begin_s:.1f} s", flush=True)

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


def killed_clients(soak: Soak) -> None:
    """They reset their connections in the midst of a stream."""
    with sockets(soak, streamed) as made:
        for one in made[:4]:
            one.recv(10)
        for one in made:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def half_open_sockets(soak: Soak) -> None:
    """They send a part of a request, and nothing more, while others ask."""
    parts = b"", b"POST /v1/comp", streamed(0)[:-40], b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03"
    with sockets(soak, lambda i: parts[i % len(parts)]):
        for _ in range(3):
            soak.ask()


def slow_readers(soak: Soak) -> None:
    """They read nothing while others ask, and then all of it."""
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


# ------------------------------------------------------------------------------------- of processes


def stopped_server(soak: Soak) -> None:
    """SIGSTOP for seconds, with requests under way."""
    soak.server.process.send_signal(signal.SIGSTOP)
    try:
        time.sleep(soak.rng.uniform(0.5, 3.0))
    finally:
        soak.server.process.send_signal(signal.SIGCONT)
    soak.ask()


def replaced_server(soak: Soak) -> None:
    """SIGTERM under load, and another server of the same cache."""
    soak.stop()
    soak.server = Server(soak.folder, soak.cache)


def exit_at_work(soak: Soak) -> None:
    """The interpreter ends while a thread generates."""
    run = subprocess.run(
        [sys.executable, "-c", EXITS, str(soak.cache)], capture_output=True, text=True,
        env=environment(), timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    expect(run.returncode == 0, f"status {run.returncode}: {run.stderr[-500:]}")


def several_engines(soak: Soak) -> None:
    """Two engines in one process, on the same two devices."""
    run = subprocess.run(
        [sys.executable, "-c", ENGINES, str(soak.cache), PROMPT], capture_output=True, text=True,
        env=environment(), timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    expect(run.returncode == 0, f"status {run.returncode}: {run.stderr[-500:]}")
    expect(run.stdout.split() == [soak.generated], f"{run.stdout} instead of {soak.generated}")


# ----------------------------------------------------------------------------------------- of files


def damaged_cache(soak: Soak) -> None:
    """Entries with other bytes, cut short, empty, or replaced by folders and links."""
    files = [file for file in soak.cache.rglob("*-cache") if file.is_file()]
    for i in soak.rng.permutation(len(files))[:6]:
        damage(files[i], soak.rng)
    found, run = soak.generate(cache=soak.cache)
    expect(found == soak.generated, f"{found} instead of {soak.generated}: {run.stderr[-500:]}")


def concurrent_writers(soak: Soak) -> None:
    """Processes that fill one new cache at once."""
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


FULL = """
import resource, runpy, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (NUM_BYTES, NUM_BYTES))
sys.argv = sys.argv[2:]
runpy.run_module("detjax.generate", run_name="__main__")
"""


def full_disk(soak: Soak) -> None:
    """No file can have more than so many bytes: nothing is kept, and the answer is the same."""
    script = soak.folder / "full.py"
    script.write_text(FULL.replace("NUM_BYTES", str(pick((0, 100, 65536), soak.rng))))
    with tempfile.TemporaryDirectory(dir=soak.folder) as cache:
        found, run = soak.generate(cache=Path(cache), through=str(script))
        expect(found == soak.generated, f"{found} instead of {soak.generated}: {run.stderr[-500:]}")
        left = [str(file) for file in Path(cache).rglob("tmp*")]
        expect(not left, f"left over: {left}")


def damaged_folder(soak: Soak) -> None:
    """A model with a file that is cut, missing or other bytes is refused in words, or the same."""
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


type Fault = Callable[[Soak], None]

FAULTS: tuple[Fault, ...] = (
    killed_clients, half_open_sockets, stopped_server, slow_readers, damaged_folder, damaged_cache,
    exit_at_work, replaced_server, several_engines, full_disk, concurrent_writers,
)  # fmt: skip
"""The short ones first: the first round meets them in this order."""


# ------------------------------------------------------------------------------------------ report


def report(soak: Soak, *, seconds: float, seed: int, memory: tuple[float, float]) -> str:
    """What happened, as a page."""
    failures = [(name, text) for name, count in soak.counts.items() for text in count.failures]
    lines = [
        f"# Soak of {seconds:.0f} s",
        "",
        f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {os.cpu_count()} cores, seed {seed}; "
        "`python tools/soak.py`.",
        "",
        f"- {soak.num_answers} answers beside the faults, {len(soak.wrong)} wrong; "
        f"{soak.num_refused} refused or cut while a server was replaced.",
        f"- Memory of the last server: {memory[0]:.0f} MiB when it was ready, {memory[1]:.0f} at "
        f"the end; {soak.server.num_files()} open files.",
        "",
        "| fault | survived | failed | seconds each |",
        "|---|---|---|---|",
    ]
    for name, count in soak.counts.items():
        each = count.seconds / (count.num_survived + len(count.failures))
        lines.append(f"| {name} | {count.num_survived} | {len(count.failures)} | {each:.1f} |")
    lines += ["", *(f"- {name}: {text}" for name, text in failures)]
    lines += [f"- wrong: {text}" for text in soak.wrong[:20]]
    return "\n".join(lines).rstrip() + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Run it; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3600.0, help="least time that faults come")
    parser.add_argument("--only", nargs="+", choices=[fault.__name__ for fault in FAULTS],
                        default=[fault.__name__ for fault in FAULTS], metavar="FAULT",
                        help="which; all by default: %(choices)s")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of their order and kinds")
    parser.add_argument("--report", type=Path, help="a file for the report, Markdown")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="detjax_soak_") as folder:
        faults = [fault for fault in FAULTS if fault.__name__ in args.only]
        soak = Soak(Path(folder), np.random.default_rng(args.seed), faults)
        try:
            ready_mib = soak.server.rss_mib()
            soak.run(args.seconds)
            memory = ready_mib, soak.server.rss_mib()
            text = report(soak, seconds=args.seconds, seed=args.seed, memory=memory)
            soak.stop()
        finally:
            soak.server.process.kill()
    print(text)
    if args.report is not None:
        args.report.write_text(text)
    is_well = not soak.wrong and not any(count.failures for count in soak.counts.values())
    return 0 if is_well and soak.num_answers else 1


if __name__ == "__main__":
    sys.exit(main())
