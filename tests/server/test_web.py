# SPDX-License-Identifier: Apache-2.0
"""What is around the answers: encodings, keys, other origins, HTTPS, metrics and their names."""

import argparse
import logging
import re
import ssl
import subprocess
import sys

import httpx
import pytest

from detjax.cli.errors import InputError
from detjax.engine.metrics import (
    BETWEEN_TOKENS_BOUNDS,
    END_TO_END_BOUNDS,
    FIRST_TOKEN_BOUNDS,
    LOG_BOUNDS,
    Histogram,
)
from detjax.serve import check_files, check_options, listen, make_parser
from detjax.server.options import WebOptions, access_filter, web_options
from detjax.server.served_model import Limits
from detjax.server.service import Service, _less_folders

from .conftest import served
from .small import body, small_service


@pytest.fixture(scope="module")
def small():
    with served(small_service(), None) as running, running.client() as client:  # type: ignore[arg-type]
        yield client


@pytest.fixture(scope="module")
def starting():
    """One that has no model yet, with a key, open metrics and friends at one origin."""
    options = WebOptions(has_open_metrics=True, origins=("https://a.example",))
    service = Service(None, Limits())
    with served(service, None, api_keys=["key"], options=options) as running:  # type: ignore[arg-type]
        yield running.url


def parsed(*argv: str) -> argparse.Namespace:
    parser = make_parser()
    args = parser.parse_args(argv)
    check_options(args)
    return args


@pytest.mark.parametrize(
    ("coding", "status"), [("gzip", 415), ("br, gzip", 415), ("identity", 200), ("Identity", 200)]
)
def test_a_body_that_is_encoded_is_refused_by_name(small, coding, status):
    told = small.post("/v1/completions", content=body(), headers={"Content-Encoding": coding})
    assert told.status_code == status
    if status != 200:
        error = told.json()["error"]
        assert error["param"] == "Content-Encoding" and coding in error["message"]


FORM = {"type": "json_object"}
HI = {"role": "user", "content": "hi"}
CALL = {"role": "assistant", "content": "Well", "tool_calls": [
    {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "fields", "param", "says"),
    [
        ("completions", {"logit_bias": {"99999": 1}}, "logit_bias", "token id 99999"),
        ("completions", {"allowed_token_ids": [99999]}, "allowed_token_ids", "token id 99999"),
        ("completions", {"stop_token_ids": [99999]}, "stop_token_ids", "token id 99999"),
        ("completions", {"stop_token_ids": [-1]}, "stop_token_ids", "token id -1"),
        ("completions", {"allowed_token_ids": [9], "bad_words": ["x"] * 1025}, "bad_words", "1025"),
        ("completions", {"bad_words": ["qrst uvwx yz" * 9]}, "bad_words", "^bad_words="),
        ("completions", {"priority": 101}, "priority", "priority=101"),
        ("completions", {"truncate_prompt_tokens": 129}, "truncate_prompt_tokens", "129"),
        ("completions", {"structured_outputs": {"choice": []}}, "structured_outputs",
         "^structured_outputs=choice"),
        ("completions", {"ignore_eos": True, "structured_outputs": {"regex": "a"}}, "ignore_eos",
         "with structured_outputs, "),
        ("chat/completions", {"ignore_eos": True, "response_format": FORM}, "ignore_eos",
         "with response_format, "),
        ("chat/completions", {"response_format": FORM}, "response_format", "^response_form"),
        ("chat/completions", {"tool_choice": "required", "tools": [{"type": "user"}]},
         "tools[0].type", "'user' is not supported"),
        ("chat/completions", {"tools": [{"type": "function", "function": {"name": "f",
         "parameters": 5}}]}, "tools[0].function.parameters", "parameters=5 must be a JSON schema"),
        ("chat/completions", {"messages": [HI, CALL]}, "messages[1].tool_calls",
         "^messages.1..tool_calls: the chat template of small does not print it"),
        ("chat/completions", {"max_completion_tokens": 3, "min_tokens": 5}, "min_tokens",
         "max_completion_tokens=3"),
        ("chat/completions", {"max_tokens": 3, "min_tokens": 5}, "min_tokens", " max_tokens=3"),
    ],
)  # fmt: skip
def test_an_error_has_the_names_of_the_request(small, path, fields, param, says):
    asked = {"model": "small"} | fields
    asked = ({"prompt": "sea"} if path == "completions" else {"messages": [HI]}) | asked
    told = small.post(f"/v1/{path}", json=asked)
    error = told.json()["error"]
    assert (told.status_code, error["param"]) == (400, param), error
    assert re.search(says, error["message"]) and "structured_output=" not in error["message"]


def test_an_error_has_no_folder_of_this_machine(small):
    asked = {"model": "small", "messages": [{"role": "user", "content": "hi"}],
             "chat_template_kwargs": {"zz": 1}}  # fmt: skip
    message = small.post("/v1/chat/completions", json=asked).json()["error"]["message"]
    assert "the chat template of small has no such variable" in message
    reason = "XlaRuntimeError: /opt/a b/x.py and /usr/lib/py-3/x.py:7 of https://a.org/b/c, 1/2"
    assert _less_folders(reason) == (
        "XlaRuntimeError: a b/x.py and x.py:7 of https://a.org/b/c, 1/2"
    )


def test_metrics_need_no_key_where_the_operator_says_so(starting):
    assert httpx.get(f"{starting}/metrics").status_code == 200
    assert httpx.get(f"{starting}/v1/models").status_code == 401
    assert not web_options(parsed("--api-key", "k")).has_open_metrics
    assert web_options(parsed("--api-key", "k", "--metrics-without-key")).has_open_metrics


def test_pages_of_allowed_origins_may_ask_and_no_others(starting):
    asks = {"Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization"}  # fmt: skip
    for origin, may in (("https://a.example", True), ("https://b.example", False)):
        told = httpx.options(f"{starting}/v1/completions", headers=asks | {"Origin": origin})
        assert (told.status_code == 200) == may
        assert (told.headers.get("access-control-allow-origin") == origin) == may
        # An error is read by the page too.
        error = httpx.get(f"{starting}/v1/models", headers={"Origin": origin})
        assert error.status_code == 401
        assert (error.headers.get("access-control-allow-origin") == origin) == may


def test_no_page_of_another_origin_may_ask_by_default(small):
    told = small.get("/version", headers={"Origin": "https://a.example"})
    assert told.status_code == 200 and "access-control-allow-origin" not in told.headers


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("https://evil.example", 403),
        ("null", 403),
        ("http://testserver.evil.example", 403),
        ("own", 200),
        (None, 200),
    ],
)
def test_a_page_of_a_stranger_spends_no_time_of_a_server_without_a_key(small, origin, status):
    """A browser sends `text/plain` without asking first."""
    own = f"http://{small.base_url.netloc.decode()}"
    headers = {} if origin is None else {"Origin": own if origin == "own" else origin}
    told = small.post(
        "/v1/completions",
        content='{"model": "small", "prompt": "a", "max_tokens": 1}',
        headers={"Content-Type": "text/plain"} | headers,
    )
    assert told.status_code == status
    if status == 403:
        assert "--allowed-origins" in told.json()["error"]["message"]
        assert small.post("/reset_prefix_cache", headers=headers).status_code == 403


@pytest.mark.parametrize(
    ("name", "is_local", "status"),
    [
        ("evil.example", True, 403),
        ("evil.example", False, 200),  # the name of a server that others reach
        ("localhost", True, 200),
        ("127.0.0.1", True, 200),
        ("[::1]", True, 200),
    ],
)
def test_a_strangers_name_for_this_machine_is_refused(name, is_local, status):
    """DNS rebinding: the page's name stands for the address of a server that only this host has."""
    options = WebOptions(is_local=is_local)
    with served(small_service(), None, options=options) as running, running.client() as client:  # type: ignore[arg-type]
        told = client.post(
            "/v1/completions", json={"prompt": "a", "max_tokens": 1},
            headers={"Host": f"{name}:8000", "Origin": f"http://{name}:8000"},
        )  # fmt: skip
    assert told.status_code == status


@pytest.mark.parametrize(
    ("host", "is_local"),
    [("127.0.0.1", True), ("::1", True), ("LOCALHOST", True), ("a.localhost", True),
     ("0.0.0.0", False), ("::", False), ("10.1.2.3", False), ("localhost.example", False)],
)  # fmt: skip
def test_which_hosts_only_this_machine_reaches(host, is_local):
    assert web_options(parsed("--host", host)).is_local == is_local


@pytest.mark.parametrize("variable", ["DETJAX_API_KEY", "DETJAX_ADMIN_API_KEY"])
@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("", "is empty"),
        (" ", "is empty"),
        ("k\u00e9y", "outside ASCII"),
        ("key\n", "space at an end"),
    ],
)
def test_a_secret_that_was_not_found_opens_nothing(monkeypatch, variable, value, says):
    monkeypatch.setenv(variable, value)
    with pytest.raises(InputError, match=f"{variable} .*{says}"):
        parsed()


def test_one_server_alone_has_an_address():
    """At once: before either has loaded a model."""
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(OSError, match=f"--port {port}: Address already in use"):
            listen("127.0.0.1", port)


def test_version_needs_no_key_and_names_no_folder(small):
    assert small.get("/version").json()["model"]["name"] == "small"


def test_origins_are_given_as_words_or_as_vllm_has_them():
    words = web_options(parsed("--allowed-origins", "https://a", "https://b"))
    as_json = web_options(parsed("--allowed-origins", '["https://a", "https://b"]'))
    assert words == as_json and words.origins == ("https://a", "https://b")
    assert words.methods == words.headers == ("*",)


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("HTTPS://Pages.Example", "https://pages.example"),
        ("https://a.example:443", "https://a.example"),
        ("http://localhost:080", "http://localhost"),
        ("https://a.example:80", "https://a.example:80"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("chrome-extension://abc", "chrome-extension://abc"),
        ("null", "null"),
        ("*", "*"),
    ],
)
def test_origins_are_those_that_browsers_send(given, sent):
    assert web_options(parsed("--allowed-origins", given)).origins == (sent,)


@pytest.mark.parametrize(
    "origin",
    ["https://a/", "not an origin", "https://*.example", "https://a b", "https://\u00e4.example",
     "https://a:0", "https://a:99999", "https://a,https://b", "https://u@a", "https://", "a:80",
     ""],
)  # fmt: skip
def test_an_origin_that_no_browser_sends_is_refused(origin):
    with pytest.raises(InputError, match=f"^--allowed-origins {re.escape(repr(origin))} is no"):
        parsed("--allowed-origins", origin)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--allow-credentials"], "need --allowed-origins"),
        (["--allowed-origins", "[1]"], "no list of texts"),
        (["--metrics-without-key"], "needs --api-key"),
        (["--ssl-keyfile", "k.pem"], "--ssl-keyfile is of HTTPS; give --ssl-certfile too"),
        (["--ssl-cert-reqs", "2"], "--ssl-cert-reqs is of HTTPS; give --ssl-certfile too"),
        (["--dp", "3", "--batch-size", "8"], "--batch-size 8 must be a multiple of --dp 3"),
        (["--max-body-mb", "inf"], "below 1,000,000"),
        (["novels-6m"], "novels-6m; it belongs to no option: a model is --model NAME"),
        (["--served-model-name", "a", "b"], "--served-model-name takes one name"),
        (["--ssl-certfile", "c.pem", "--ssl-cert-reqs", "2"], "needs --ssl-ca-certs"),
        (["--log-level", "loud"], "invalid choice"),
        (["--speculative-config", "{"], "--speculative-config: { is no JSON object"),
        (["--mode", "dvr", "--speculative-config", '{"method": "ngram"}'], "--mode invariant"),
    ],
)
def test_options_that_do_not_go_together_are_refused(argv, says):
    with pytest.raises(InputError, match=re.escape(says)):
        parsed(*argv)


def test_a_certificate_that_is_none_is_refused_before_the_model(tmp_path):
    with pytest.raises(FileNotFoundError, match="--ssl-certfile .* is no file"):
        check_files(parsed("--ssl-certfile", str(tmp_path / "c.pem")))
    (tmp_path / "c.pem").write_text("x")
    with pytest.raises(ValueError, match="has no private key; give --ssl-keyfile too"):
        check_files(parsed("--ssl-certfile", str(tmp_path / "c.pem")))
    (tmp_path / "c.pem").write_text("-----BEGIN PRIVATE KEY-----")
    with pytest.raises(ValueError, match="--ssl-certfile"):
        check_files(parsed("--ssl-certfile", str(tmp_path / "c.pem")))


def test_a_server_with_a_certificate_speaks_https(tmp_path):
    """The command itself, while it starts."""
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-keyout", key,
         "-out", certificate, "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    command = [sys.executable, "-m", "detjax.serve", "--port", "0", "--ssl-keyfile", str(key),
               "--ssl-certfile", str(certificate)]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        lines = iter(server.stderr.readline, "")
        url = next(found[0] for line in lines if (found := re.search(r"https://\S+", line)))
        try:
            context = ssl.create_default_context(cafile=str(certificate))
            told = httpx.get(f"{url}/health/live", verify=context, timeout=60)
            with pytest.raises(httpx.TransportError):
                httpx.get(f"{url}/health/live".replace("https", "http"), timeout=10)
        finally:
            server.kill()
    assert told.status_code == 200


@pytest.mark.parametrize(
    ("argv", "logged"),
    [
        ([], ["/metrics", "/x"]),
        (["--disable-uvicorn-access-log"], []),
        (["--disable-access-log-for-endpoints", "/metrics,/health"], ["/x"]),
    ],
)
def test_lines_of_requests_may_be_left_out(argv, logged):
    is_logged = access_filter(parsed(*argv))
    record = logging.LogRecord("a", logging.INFO, "", 0, "", None, None)
    found = []
    for path in ("/metrics", "/x"):
        record.path = path
        found += [path] if is_logged(record) else []
    assert found == logged


def test_a_draft_model_that_is_not_there_is_refused_before_the_model():
    args = parsed("--speculative-config", '{"model": "./no-such"}')
    with pytest.raises(InputError, match="--speculative-config: './no-such' is neither"):
        check_files(args)


def test_drafts_are_told_by_their_source():
    service = small_service()
    assert service.model is not None
    service.stats().note_drafts("ngram", 3, 2)
    with served(service, None) as running, running.client() as client:  # type: ignore[arg-type]
        card = client.get("/v1/models").json()["data"][0]
        metrics = client.get("/metrics").text
    counts = {"num_windows": 1, "acceptance": 2 / 3, "tokens_per_window": 3.0}
    assert card["drafts"] == {"ngram": counts}
    for name, value in (("windows", 1), ("draft_tokens", 3), ("accepted_tokens", 2)):
        assert f'detjax_source_{name}_total{{source="ngram"}} {value}.0' in metrics


def test_metrics_have_vllms_names_labels_and_buckets(small):
    for _ in range(2):
        assert small.post("/v1/completions", content=body()).status_code == 200
    text = small.get("/metrics").text
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    of = '{engine="0",model_name="small"'
    for name in ("prompt_tokens_total", "generation_tokens_total", "num_requests_running",
                 "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total",
                 "prefix_cache_queries_total", "prefix_cache_hits_total"):  # fmt: skip
        assert f"vllm:{name}{of}}}" in found, name
    assert found[f"vllm:generation_tokens_total{of}}}"] == found["detjax_decode_tokens_total"]
    ends = {
        reason: float(
            found[
                f'vllm:request_success_total{{engine="0",finished_reason="{reason}",model_name="small"}}'
            ]
        )
        for reason in ("stop", "length", "abort", "error")
    }
    assert ends["length"] >= 2 and sum(ends.values()) >= 2
    for name, edges in (
        ("time_to_first_token_seconds", FIRST_TOKEN_BOUNDS),
        ("inter_token_latency_seconds", BETWEEN_TOKENS_BOUNDS),
        ("e2e_request_latency_seconds", END_TO_END_BOUNDS),
    ):
        buckets = re.findall(rf'vllm:{name}_bucket{{.*le="([^"]+)".*}} (\S+)', text)
        assert [float(edge) for edge, _ in buckets[:-1]] == list(edges)
        counts = [float(count) for _, count in buckets]
        assert counts == sorted(counts) and buckets[-1][0] == "+Inf"
        assert counts[-1] == float(found[f"vllm:{name}_count{of}}}"]) > 0


def test_a_histogram_counts_exactly_up_to_every_edge():
    histogram, values = Histogram(), []
    for edge in (*FIRST_TOKEN_BOUNDS, *LOG_BOUNDS[40:100]):
        for value in (edge * (1 - 1e-12), edge, edge * (1 + 1e-12)):
            histogram.add(value)
            values.append(value)
    for edge in (*FIRST_TOKEN_BOUNDS, *END_TO_END_BOUNDS, *BETWEEN_TOKENS_BOUNDS):
        assert histogram.up_to(edge) == sum(value <= edge for value in values), edge
