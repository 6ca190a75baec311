# SPDX-License-Identifier: Apache-2.0
"""What tells a machine that restarts servers: alive, ready, and who may ask the rest."""

import contextlib
import socket

import httpx
import pytest

from detjax.server.served_model import Limits
from detjax.server.service import Service, ServiceState

from .conftest import served
from .small import small_service

KEYS = ["secret"]


@pytest.fixture(scope="module")
def starting():
    service = Service(None, Limits())
    with served(service, None, api_keys=KEYS) as running:  # type: ignore[arg-type]
        yield running


def raw(url: str, head: str) -> str:
    host, port = url.removeprefix("http://").split(":")
    with contextlib.closing(socket.create_connection((host, int(port)), timeout=10)) as client:
        client.sendall(head.encode())
        return client.recv(65_536).decode()


def test_a_server_that_loads_is_live_and_not_ready(starting):
    with httpx.Client(base_url=starting.url) as client:
        live, ready = client.get("/health/live"), client.get("/health/ready")
        assert (live.status_code, live.json()) == (200, {"status": "live", "state": "starting"})
        told = ready.json()
        assert ready.status_code == 503 and told["status"] == "starting"
        assert "loading" in told["reason"] and told["since_s"] >= 0
        assert client.get("/health").json() == {"status": "starting"}


def test_a_server_that_is_ready_or_drains_or_has_failed_says_so():
    service = small_service()
    with served(service, None) as running, httpx.Client(base_url=running.url) as client:  # type: ignore[arg-type]
        assert client.get("/health/ready").json() == {"status": "ready"}
        service.state = ServiceState.DRAINING
        assert client.get("/health/ready").json()["reason"].startswith("the server stops")
        service.state, service.why_failed = ServiceState.FAILED, "the device is lost"
        ready = client.get("/health/ready")
        assert ready.status_code == 503 and ready.json()["reason"] == "the device is lost"
        assert client.get("/health/live").status_code == 200


@pytest.mark.parametrize("host", ["x", "x/health?", "x/health#", "x/version?a=", "/health?"])
def test_no_host_header_opens_a_route_without_the_key(starting, host):
    for path in ("/metrics", "/v1/models"):
        told = raw(
            starting.url, f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        )
        assert told.split()[1] in ("400", "401"), told


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_scheme_of_a_key_may_have_any_case(starting, scheme):
    for key, status in (("secret", 503), ("Secret", 401)):
        headers = {"Authorization": f"{scheme} {key}"}
        assert httpx.get(f"{starting.url}/v1/models", headers=headers).status_code == status
