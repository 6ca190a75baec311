# SPDX-License-Identifier: Apache-2.0
"""Nothing small keeps everybody waiting: attacks on a server, one by one and at once.

Meanwhile others ask for its health and for four tokens.
"""

import contextlib
import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

# Nightly: it measures how long others wait, on a machine that has nothing else to do.
pytestmark = [pytest.mark.slow, pytest.mark.nightly]

HEALTH_S = 0.2
"""Longest that `/health` may take beyond the longest that it takes when nobody attacks."""

OTHERS_S = 2.0
"""The same of four tokens, which share the engine; attacks take up to half a minute."""

MAX_GROWTH = 400 << 20

OK = {"model": "novels-6m", "prompt": "sea", "max_tokens": 4, "temperature": 0}
TURN = {"role": "user", "content": "x"}
RULES = [f'r{i}: r{i + 1} | "a" r{i + 1} | ' for i in range(2000)]
ATTACKS = {
    "prompts x n": ("/v1/completions", OK | {"prompt": ["a"] * 1024, "n": 1024}, 1),
    "a bad word": ("/v1/completions", OK | {"bad_words": ["abc " * 1_000_000]}, 2),
    "bad words": ("/v1/completions", OK | {"bad_words": [f"w{i}" for i in range(100_000)]}, 2),
    "stop": ("/v1/completions", OK | {"stop": ["a" * 4_000_000]}, 2),
    "regex": ("/v1/completions", OK | {"structured_outputs": {"regex": "a?" * 32_768}}, 2),
    "grammar": (
        "/v1/completions",
        OK | {"structured_outputs": {"grammar": "\n".join(["start: r0", *RULES, 'r2000: "z"'])}},
        2,
    ),
    "pattern": (
        "/v1/completions",
        OK | {"structured_outputs": {"json": {"type": "string", "pattern": "(x?y?)" * 8000}}},
        2,
    ),
    "prompt": ("/v1/completions", OK | {"prompt": "abc " * 500_000}, 3),
    "tokenize": ("/tokenize", {"prompt": "abc " * 250_000, "return_token_strs": True}, 6),
    "detokenize": ("/detokenize", {"tokens": [5] * 1_000_000}, 2),
    "biases": ("/v1/completions", OK | {"logit_bias": {str(i): 1 for i in range(300_000)}}, 2),
    "token ids": ("/v1/completions", OK | {"prompt": [5] * 2_000_000}, 2),
    "allowed x prompts": (
        "/v1/completions",
        OK | {"prompt": ["a"] * 1000, "allowed_token_ids": list(range(4000))},
        2,
    ),
    "messages": ("/v1/chat/completions", {"model": OK["model"], "messages": [TURN] * 100_000}, 4),
    "long chat": (
        "/v1/chat/completions",
        {"model": OK["model"], "messages": [TURN | {"content": "abc " * 500}] * 1_000},
        4,
    ),
    "lists": (
        "/v1/chat/completions",
        {"model": OK["model"], "messages": [TURN | {"content": [[]] * 2_000_000}]},
        2,
    ),
}


@dataclasses.dataclass(frozen=True)
class Served:
    """A server in a process of its own."""

    url: str
    process_id: int

    def resident_bytes(self) -> int:
        with open(f"/proc/{self.process_id}/statm") as file:
            return int(file.read().split()[1]) * 4096


@pytest.fixture(scope="module")
def hostile() -> Iterator[Served]:
    readers: list[threading.Thread] = []
    with subprocess.Popen(
        [sys.executable, "-m", "detjax.serve", "--port", "0", "--no-compile", "--max-len", "256",
         "--batch-size", "4", "--self-check", "off"],
        stderr=subprocess.PIPE, text=True, env=os.environ,
    ) as process:  # fmt: skip
        try:
            assert process.stderr is not None
            lines = iter(process.stderr)
            url = next(m[1] for line in lines if (m := re.search(r"ready: (http://\S+)", line)))
            reader = threading.Thread(target=list, args=(lines,))
            readers.append(reader)
            reader.start()
            served = Served(url, process.pid)
            # Programs are compiled now, and not beside an attack.
            for fields in ({}, {"structured_outputs": {"regex": "[a-z]{2}"}}, {"bad_words": ["x"]}):
                assert httpx.post(f"{url}/v1/completions", json=OK | fields, timeout=300).is_success
            yield served
        finally:
            process.kill()
            for reader in readers:
                reader.join()


def waits(served: Served, attack, least_s: float = 0.5) -> tuple[float, float, list]:
    """The longest that health and four tokens took during an attack, and what the attack got."""
    is_over, health_s, others_s = threading.Event(), [], []

    def poll(client: httpx.Client, spans: list[float], verb: str, path: str, **options):
        while not is_over.is_set():
            begin_s = time.perf_counter()
            assert client.request(verb, path, **options).status_code == 200
            spans.append(time.perf_counter() - begin_s)
            time.sleep(0.01)

    with contextlib.ExitStack() as stack:
        threads = []
        for spans, ask in (
            (health_s, ("GET", "/health")), (others_s, ("POST", "/v1/completions")),
        ):  # fmt: skip
            client = stack.enter_context(httpx.Client(base_url=served.url, timeout=300))
            options = {"json": OK} if ask[0] == "POST" else {}
            threads.append(
                threading.Thread(target=poll, args=(client, spans, *ask), kwargs=options)
            )
        for thread in threads:
            thread.start()
        begin_s = time.perf_counter()
        found = attack()
        time.sleep(max(0.0, least_s - (time.perf_counter() - begin_s)))
        is_over.set()
        for thread in threads:
            thread.join()
    return max(health_s), max(others_s), found


def send(served: Served, asked: list[tuple[str, bytes]]) -> list[int]:
    """Send bodies at once; their statuses."""
    statuses: list[int] = []

    def one(path: str, data: bytes):
        headers = {"Content-Type": "application/json"}
        answer = httpx.post(f"{served.url}{path}", content=data, headers=headers, timeout=300)
        statuses.append(answer.status_code)

    threads = [threading.Thread(target=one, args=pair) for pair in asked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statuses


@pytest.fixture(scope="module")
def quiet(hostile) -> tuple[float, float]:
    """The longest that health and four tokens take when nobody attacks."""
    health_s, others_s, _ = waits(hostile, list, least_s=5.0)
    return health_s, others_s


def bodies(name: str) -> list[tuple[str, bytes]]:
    path, fields, times = ATTACKS[name]
    return [(path, json.dumps(fields).encode())] * times


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_keeps_nobody_waiting(hostile, quiet, name):
    asked, before = bodies(name), hostile.resident_bytes()
    health_s, others_s, statuses = waits(hostile, lambda: send(hostile, asked))
    print(f"{name}: health {health_s:.3f} s, others {others_s:.3f} s, {statuses}")
    assert health_s < HEALTH_S + quiet[0] and others_s < OTHERS_S + quiet[1]
    assert set(statuses) <= ({200} if "tokenize" in name else {400, 429})
    assert hostile.resident_bytes() - before < MAX_GROWTH


def test_attacks_at_once_keep_nobody_waiting(hostile, quiet):
    before = hostile.resident_bytes()
    asked = [one for name in ATTACKS for one in bodies(name)]
    health_s, others_s, statuses = waits(hostile, lambda: send(hostile, asked))
    print(f"at once: health {health_s:.3f} s, others {others_s:.3f} s")
    assert set(statuses) <= {200, 400, 429}
    assert hostile.resident_bytes() - before < MAX_GROWTH
    # WHY: one body of 8 MB is received and parsed in tens of ms, and here are forty.
    assert health_s < 5 * HEALTH_S + quiet[0] and others_s < 3 * OTHERS_S + quiet[1]


def test_clients_that_leave_take_their_work_along(hostile):
    path, data = bodies("prompt")[0]
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    for _ in range(3):
        host, port = hostile.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as left:
            left.sendall(head + data)
            time.sleep(0.3)
    begin_s = time.perf_counter()
    (status,) = send(hostile, bodies("prompt")[:1])
    assert status == 400
    # Three that nobody waits for would take as long each as this one.
    assert time.perf_counter() - begin_s < 10
