# SPDX-License-Identifier: Apache-2.0
"""What the options of the server say to others. No JAX."""

import argparse
import ipaddress
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from detjax.cli.options import read_speculative_config

ACCESS_LOG = "detjax.server.access"
"""The log that has a line for each request."""

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True, kw_only=True, slots=True)
class WebOptions:
    """Who may ask a server over HTTP.

    Attributes:
        api_keys: Of which a request must have one; none lets everybody ask.
        admin_keys: Of which a request of an administrator must have one; none: there are no such
            routes.
        weights_dirs: Folders in which weights may be read, resolved.
        has_open_metrics: `/metrics` needs no key.
        origins: Whose pages may ask (CORS); `*` is all.
        methods: That these may ask with.
        headers: That these may send.
        has_credentials: They may send cookies and the like.
        is_local: The server listens on this machine's own address alone, so only pages of local
            names are its own. Behind a proxy its pages have another name, which `origins` gives.
    """

    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    weights_dirs: tuple[Path, ...] = ()
    has_open_metrics: bool = False
    origins: tuple[str, ...] = ()
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)
    has_credentials: bool = False
    is_local: bool = False


def web_options(args: argparse.Namespace) -> WebOptions:
    """What is given of `WebOptions`.

    Raises:
        ValueError: If an origin is none.
    """

    def texts(name: str, default: tuple[str, ...]) -> tuple[str, ...]:
        given = getattr(args, f"allowed_{name}") or ()
        return tuple(text for some in given for text in some) or default

    return WebOptions(
        api_keys=tuple(args.api_key),
        admin_keys=tuple(args.admin_api_key),
        weights_dirs=tuple(Path(folder).resolve() for folder in args.weights_dir),
        has_open_metrics=args.metrics_without_key,
        origins=tuple(map(read_origin, texts("origins", ()))),
        methods=texts("methods", ("*",)),
        headers=texts("headers", ("*",)),
        has_credentials=args.allow_credentials,
        is_local=is_local_name(args.host),
    )


def is_local_name(host: str | None) -> bool:
    """Whether a name or an address, without a port, is of this machine alone."""
    name = (host or "").lower().rstrip(".")
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?")
_USUAL_PORTS = {"http": 80, "https": 443}


def read_origin(text: str) -> str:
    """An origin as browsers send it: in small letters, without the usual port of its scheme.

    Raises:
        ValueError: If it is none.
    """
    if text in ("*", "null"):
        return text
    match = _ORIGIN.fullmatch(text.lower())
    if match is None or (match[3] and not 0 < int(match[3]) < 2**16):
        raise ValueError(
            f"{text!r} is no origin, such as https://pages.example or http://localhost:8080: a "
            "scheme, a name in ASCII and perhaps a port, without a path. Give several as words or "
            "as a JSON list; * alone allows all"
        )
    scheme, host, port = match.groups(default="")
    is_usual = not port or int(port) == _USUAL_PORTS.get(scheme)
    return f"{scheme}://{host}" + ("" if is_usual else f":{int(port)}")


def texts_of_option(text: str) -> list[str]:
    """A text, or a list of them as JSON, as vLLM's server takes it."""
    if not text.startswith("["):
        return [text]
    try:
        return msgspec.json.decode(text, type=list[str])
    except msgspec.MsgspecError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of texts: {error}") from error


def access_filter(args: argparse.Namespace) -> Callable[[logging.LogRecord], bool]:
    """Which lines of requests are logged."""
    quiet = {path.strip() for path in args.disable_access_log_for_endpoints.split(",")}

    def is_logged(record: logging.LogRecord) -> bool:
        path = getattr(record, "path", "")
        return not args.disable_uvicorn_access_log and path not in quiet

    return is_logged


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `EngineConfig` that are given, and those that follow from the drafts."""
    names = (
        "mode", "max_len", "batch_size", "decode_batches", "decode_steps", "max_waiting",
        "self_check",
    )  # fmt: skip
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if "decode_batches" in given:
        given["decode_batches"] = tuple(given["decode_batches"])
    speculative = read_speculative_config(args.speculative_config)
    return given if speculative is None else speculative.engine_options() | given
