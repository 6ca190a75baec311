# SPDX-License-Identifier: Apache-2.0
"""The process: it starts by one command, says when it is ready, and ends well."""

import concurrent.futures
import os
import re
import signal
import subprocess
import sys
import time

import httpx
import pytest

from detjax.serve import main, make_parser

BODY = {"model": "novels-6m", "prompt": "The old house by the sea", "temperature": 0}


@pytest.mark.slow
def test_from_start_to_sigterm_with_an_answer_under_way(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-m", "detjax.serve", "--port", "0", "--no-compile", "--max-len", "256",
         "--batch-size", "4"],
        stderr=subprocess.PIPE, text=True, env=os.environ | {"DETJAX_API_KEY": "secret"},
    ) as process:  # fmt: skip
        try:
            assert process.stderr is not None
            lines = []
            for line in process.stderr:
                lines.append(line)
                if "ready: " in line:
                    break
            url = re.findall(r"ready: (http://127\.0\.0\.1:\d+) serves novels-6m", "".join(lines))[
                0
            ]
            headers = {"Authorization": "Bearer secret"}
            with httpx.Client(base_url=url, headers=headers, timeout=300) as client:
                short = client.post("/v1/completions", json=BODY | {"max_tokens": 4}).json()
                with concurrent.futures.ThreadPoolExecutor(1) as pool:
                    body = BODY | {"max_tokens": 150, "stop_token_ids": []}
                    under_way = pool.submit(client.post, "/v1/completions", json=body)
                    while "detjax_http_requests_open 1" not in client.get("/metrics").text:
                        assert not under_way.done()
                    process.send_signal(signal.SIGTERM)
                    whole = under_way.result().json()
            assert process.wait(60) == 0
            assert whole["choices"][0]["text"].startswith(short["choices"][0]["text"])
            assert whole["usage"]["completion_tokens"] > 4
            assert "draining: 1 requests are open" in process.stderr.read()
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("until", "number", "code"),
    [
        ("pages, ", signal.SIGINT, 130),  # the model is loaded, and programs are compiled
        pytest.param("pages, ", signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param("loading novels-6m", signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param("ready: ", signal.SIGINT, 0, marks=pytest.mark.slow),
        pytest.param("ready: ", signal.SIGTERM, 0, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_a_server_without_open_requests_at_once(until, number, code):
    """A compiler does not look up from its work: it takes seconds more, and nobody waits for it."""
    options = ["--port", "0", "--cache-dir", "none", "--max-len", "256"]
    with subprocess.Popen(
        [sys.executable, "-m", "detjax.serve", *options], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        while until not in process.stderr.readline():
            assert process.poll() is None
        sent_s = time.monotonic()
        process.send_signal(number)
        rest = process.stderr.read()
        assert process.wait() == code, rest
        assert time.monotonic() - sent_s < 3  # one, on a machine that does nothing else
    assert "Traceback" not in rest and "ready" not in rest


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--port", "99999"], "--port 99999"),
        (["--api-key", " "], "--api-key is empty"),
        (["--gpu-memory-utilization", "0"], "--gpu-memory-utilization 0"),
        (["--request-timeout", "-1"], "--request-timeout -1"),
        (["--stream-interval", "0"], "--stream-interval 0 must be at least 1"),
        (["--mode", "quick"], "invalid choice: 'quick'"),
    ],
)
def test_bad_options_end_before_a_model_is_loaded(argv, text, capsys):
    assert main(argv) == 2
    assert text in capsys.readouterr().err


def test_options_have_the_names_of_vllm_too():
    argv = "--max-model-len 9 --tensor-parallel-size 2 --gpu-memory-utilization 0.5".split()
    args = make_parser().parse_args([*argv, "--max-num-seqs", "7"])
    assert (args.max_len, args.tp, args.gpu_memory_utilization, args.batch_size) == (9, 2, 0.5, 7)


def test_an_address_that_is_taken_is_one_line(capsys):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--port", str(port)]) == 2
        assert f"--port {port}: Address already in use" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_one_line(tmp_path, capsys):
    assert main(["--port", "0", "--model", str(tmp_path / "none"), "--cache-dir", "none"]) == 2
    assert "error: " in capsys.readouterr().err


def test_help_teaches_and_starts_no_jax():
    script = (
        "import sys\n"
        "from detjax.serve import make_parser\n"
        "text = make_parser().format_help()\n"
        "assert 'curl' in text and 'exit codes' in text\n"
        "assert 'jax' not in sys.modules\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
