# SPDX-License-Identifier: Apache-2.0
"""`python -m detjax.serve`: serve a model over HTTP with OpenAI's API.

An answer has the same bits under any load.

JAX is imported only once the command line is known to be good.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from detjax.cli import options
from detjax.cli.command_line import (
    CommandParser,
    check_counts,
    check_model_option,
    check_replicas,
    check_share,
    description_of,
)
from detjax.cli.errors import EXIT_CODES, OK, InputError, bad_input, exit_code
from detjax.cli.options import (
    NO_CACHE,
    Option,
    add_options,
    check_drafts,
    flag_like,
    in_flags,
    of_field,
    read_lora_modules,
)
from detjax.cli.receipts import check_signing_key
from detjax.defaults import check_cache_dtype, kv_cache_dtype_of
from detjax.engine.config import EngineConfig, check_adapter_mode
from detjax.models.adapters.limits import check_adapter_sizes
from detjax.models.adapters.peft_config import read_peft_config
from detjax.models.tokenizer_files import read_template_file
from detjax.parallel.job_spec import JobSpec, find_job
from detjax.server.options import (
    ACCESS_LOG,
    LOG_LEVELS,
    access_filter,
    engine_options,
    texts_of_option,
    web_options,
)

EXAMPLES = f"""\
examples:
  python -m detjax.serve
  python -m detjax.serve -m meta-llama/Llama-3.1-8B-Instruct --tp 2 --api-key "$KEY"
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
       -d '{{"model": "novels-6m", "prompt": "The old house by the sea"}}'

Every answer carries `system_fingerprint`, and in each choice a `detjax` object with the digest of
its token ids and float32 logprobs: the same request has the same digest under any load, at any
batch size, on any mesh.

{EXIT_CODES}.
After SIGINT or SIGTERM a server that is ready exits with 0, and one that is still starting with 130
or 143. In a job of several processes, 1 can also mean that another process has ended.
"""

MODEL_OPTIONS = (
    options.MODEL,
    options.REVISION,
    Option(
        name="served_model_name",
        metavar="NAME",
        default_text="the last part of --model",
        help="name of the model in requests",
    ),
    options.DTYPE,
    options.CAST_WEIGHTS,
    options.QUANTIZED_WEIGHTS,
    options.KV_CACHE_DTYPE,
    options.BACKEND,
    options.GENERATION_CONFIG,
    options.CHAT_TEMPLATE,
    options.ENABLE_LORA,
    options.LORA_MODULES,
)
_DECODE_BATCHES = replace(
    of_field(EngineConfig, "decode_batches"), parse=int, nargs="+", default=None,
    default_text="on a GPU several sizes below --batch-size",
    help="further batch sizes, below --batch-size, for which a decode step is compiled",
)  # fmt: skip
_MAX_NUM_BATCHED_TOKENS = Option(
    name="max_num_batched_tokens", parse=int, default=8192,
    help="on a GPU, most prompt tokens that are computed between two decode steps. More lower the "
    "time to the first token and raise throughput; fewer lower the time between tokens",
)  # fmt: skip
_MAX_WAITING = replace(
    of_field(EngineConfig, "max_waiting"), default=4096,
    help="most sequences that wait; further requests get status 429",
)  # fmt: skip
ENGINE_OPTIONS = (
    options.MODE,
    options.SPECULATIVE_CONFIG,
    options.DECODE_STEPS,
    options.TP,
    options.DP,
    options.MAX_LEN,
    options.BATCH_SIZE,
    _DECODE_BATCHES,
    _MAX_NUM_BATCHED_TOKENS,
    _MAX_WAITING,
    options.MAX_LORAS,
    options.MAX_LORA_RANK,
    options.MAX_EXPERT_LORA_RANK,
    options.GPU_MEMORY_UTILIZATION,
    options.SELF_CHECK,
    Option(
        name="no_compile", default=False,
        help="compile a program only when a request first needs it. All requests wait meanwhile; "
        "the log and /health report it",
    ),
    options.CACHE_DIR,
    options.WARM,
)  # fmt: skip
ENGINE_TITLE = "engine (these options change no bit, except --mode fast)"
_STREAM_INTERVAL = Option(
    name="stream_interval", parse=int, default=1,
    help="tokens per event of a stream. The first token is sent at once. More tokens per event use "
    "less CPU time",
)  # fmt: skip
_MAX_BODY_MB = Option(
    name="max_body_mb", parse=float, default=8.0, help="largest body of a request, in megabytes"
)
_DRAIN_TIMEOUT = Option(
    name="drain_timeout", parse=float, default=30.0, metavar="SECONDS",
    help="time that running requests have to finish after SIGTERM",
)  # fmt: skip
_REQUESTS_PER_KEY = Option(
    name="requests_per_key",
    parse=int,
    default=0,
    help="most requests of one API key at once; 0: no limit",
)
_REQUEST_TIMEOUT = Option(
    name="request_timeout", parse=float, default=0.0, metavar="SECONDS",
    help="a request that takes longer is aborted; 0: no limit",
)  # fmt: skip
_HTTP = (
    Option(
        name="host", default="127.0.0.1", metavar="ADDRESS",
        help="address to listen on; 0.0.0.0: every interface",
    ),
    Option(name="port", parse=int, default=8000, help="port to listen on; 0: a free one"),
    Option(
        name="api_key", default=(), metavar="KEY", 
        default_text="the variable DETJAX_API_KEY, else no key is needed",
        help="API key that clients must send; may be given several times",
    ),
    Option(
        name="admin_api_key", default=(), metavar="KEY",
        default_text="the variable DETJAX_ADMIN_API_KEY, else these routes are off",
        help="API key of the routes for weights, adapters, sleep and pause; may be given several "
        "times",
    ),
    Option(
        name="weights_dir", default=(), metavar="DIR", default_text="none",
        help="folder that POST /update_weights_from_disk and /v1/load_lora_adapter may read; may "
        "be given several times",
    ),
    Option(name="metrics_without_key", default=False, help="serve /metrics without a key"),
    options.SIGN,
    _MAX_BODY_MB,
    _REQUESTS_PER_KEY,
    _REQUEST_TIMEOUT,
    _STREAM_INTERVAL,
    Option(
        name="log_prompts", default=False,
        help="write the text of prompts to the log; without it the log has no text of requests",
    ),
    _DRAIN_TIMEOUT,
    Option(
        name="log_level", flags=("--log-level", "--uvicorn-log-level"), choices=LOG_LEVELS,
        default="info", help="lowest level that is logged; the line of a request has level info",
    ),
    Option(
        name="disable_uvicorn_access_log", default=False, help="do not log requests"
    ),
    Option(
        name="disable_access_log_for_endpoints", default="", metavar="PATHS",
        help="do not log requests of these paths, such as /health/ready,/metrics",
    ),
)  # fmt: skip
_HTTPS = (
    Option(name="ssl_keyfile", metavar="FILE", help="private key of the certificate, PEM"),
    Option(name="ssl_certfile", metavar="FILE", help="certificate, PEM"),
    Option(
        name="ssl_ca_certs", metavar="FILE",
        help="certificates of the authorities that sign clients' certificates, PEM",
    ),
    Option(
        name="ssl_cert_reqs", parse=int, choices=(0, 1, 2), default=0,
        help="certificates of clients. 0: not asked for. 1: checked if sent. 2: required",
    ),
)  # fmt: skip
_CORS = (
    *(
        Option(
            name=f"allowed_{name}", nargs="+", metavar="TEXT", default=(), parse=texts_of_option,
            default_text=default, help=f"{what}; or a JSON list",
        )
        for name, what, default in (
            ("origins", "allowed origins, such as https://a.example; *: all", "none"),
            ("methods", "HTTP methods that these origins may use", "all"),
            ("headers", "HTTP headers that these origins may send", "all"),
        )
    ),
    Option(name="allow_credentials", default=False, help="allow cookies and other credentials"),
)  # fmt: skip
_AT_LEAST_1 = (
    options.TP, options.DP, options.MAX_LEN, options.BATCH_SIZE, _MAX_WAITING,
    _MAX_NUM_BATCHED_TOKENS, options.MAX_LORAS, options.MAX_LORA_RANK,
)  # fmt: skip


def make_parser() -> CommandParser:
    """The command line."""
    parser = CommandParser(
        "serve", description=description_of(__doc__), epilog=EXAMPLES, stands_for_vllm=True
    )
    add_options(parser, "model", MODEL_OPTIONS)
    add_options(parser, ENGINE_TITLE, ENGINE_OPTIONS)
    add_options(parser, "several processes", options.JOB)
    add_options(parser, "server", _HTTP)
    add_options(parser, "HTTPS", _HTTPS)
    add_options(parser, "pages of other origins (CORS)", _CORS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT."""
    return exit_code(lambda: _run(make_parser().parse(argv)))


def _run(args: argparse.Namespace) -> int:
    check_options(args)
    with bad_input(rephrase=partial(in_flags, options=ENGINE_OPTIONS), kinds=(ImportError,)):
        job = None if args.warm else find_job(args.coordinator, args.num_processes, args.process_id)
        if job is not None and (args.enable_lora or args.lora_modules):
            raise InputError(
                "--enable-lora and --lora-modules do not go with a job of "
                f"{job.num_processes} processes; serve adapters by one process"
            )
        serves = not args.warm and (job is None or job.process_id == 0)
        with listen(args.host, args.port) if serves else contextlib.nullcontext() as listener:
            check_files(args)
            return _start(args, job, listener)


def _start(args: argparse.Namespace, job: JobSpec | None, listener: socket.socket | None) -> int:
    """Import JAX, and do what is asked for; `listener` is of the process that serves."""
    try:
        from detjax.server.job import follow_server
        from detjax.server.server import open_llm, serve, warm
    except ImportError as error:
        raise ImportError(f'{error}; pip install "detjax[serve]"') from error
    if args.warm:
        log_to_stderr(args.log_level)
        print(warm(args))
        return OK
    if listener is None:
        assert job is not None
        return follow_server(args, job, open_llm)
    log_to_stderr(args.log_level)
    logging.getLogger(ACCESS_LOG).addFilter(access_filter(args))
    return asyncio.run(serve(args, listener, job))


def end_at_once_by_signals() -> None:
    """Let SIGINT and SIGTERM end the process until the server is ready, whatever it does.

    # WHY: a thread that compiles cannot be interrupted, and Python would wait for it. Of what is
    # kept on disk nothing is ever half written.
    """

    def end(number: int, frame: object) -> None:
        os.write(2, b"\ninterrupted\n")
        os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)


def leave(code: int) -> NoReturn:
    """End this process, which has no more to do.

    # WHY: Python and JAX take half a second to take down what goes with the process. In a job
    # of several, JAX tells the others.
    """
    jax = sys.modules.get("jax")
    if jax is None or jax.process_count() > 1:
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


_BACKLOG = 2048
"""Connections that wait to be accepted, as uvicorn has it."""


def listen(host: str, port: int) -> socket.socket:
    """Take the address.

    Raises:
        OSError: If it is taken, or not one of this machine; the message names it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        # WHY: at once. Two servers that have only bound an address both have it.
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(
            f"--host {host} --port {port}: {error.strerror}; give another, or --port 0 for any"
        ) from error
    return listener


def check_files(args: argparse.Namespace) -> None:
    """Refuse files and a model that are not there, before JAX is imported.

    Raises:
        ValueError, OSError: Naming what it was.
    """
    check_model_files(args)
    for folder in args.weights_dir:
        if not Path(folder).is_dir():
            raise FileNotFoundError(f"--weights-dir {folder} is no folder")
    for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
        if (path := getattr(args, name)) is not None and not Path(path).is_file():
            raise FileNotFoundError(f"--{name.replace('_', '-')} {path} is no file")
    if args.ssl_certfile is not None:
        if args.ssl_keyfile is None and b"PRIVATE KEY" not in Path(args.ssl_certfile).read_bytes():
            raise ValueError(
                f"--ssl-certfile {args.ssl_certfile} has no private key; give --ssl-keyfile too"
            )
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
                args.ssl_certfile, args.ssl_keyfile
            )
        except (ssl.SSLError, OSError) as error:
            raise ValueError(
                f"--ssl-certfile {args.ssl_certfile} with --ssl-keyfile {args.ssl_keyfile}: {error}"
            ) from error


def check_model_files(args: argparse.Namespace) -> None:
    """Refuse a key for receipts, a template and a model that are not there.

    Raises:
        ValueError, OSError: Naming what it was.
    """
    if args.sign is not None:
        check_signing_key(args.sign)
    if args.chat_template is not None:
        try:
            read_template_file(Path(args.chat_template))
        except ValueError as error:
            raise ValueError(f"--chat-template: {error}") from error
    check_model_option(args.model, args.revision)
    for name, folder in read_lora_modules(args.lora_modules).items():
        with bad_input(f"--lora-modules {name}: "):
            read_peft_config(folder)
    check_drafts(args.speculative_config, args.model, args.revision)


def log_to_stderr(level: str) -> None:
    """Write what the server and the engine log to standard error."""
    # WHY: a handler of its own, as libraries that load later replace those of the root logger.
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log = logging.getLogger("detjax")
    log.handlers, log.propagate = [handler], False
    log.setLevel(level.upper())


def check_options(args: argparse.Namespace) -> None:
    """Refuse what no server could do, before a model is loaded.

    Raises:
        InputError: Naming the option and what to give.
    """
    _add_keys(args.api_key, "--api-key", "DETJAX_API_KEY", without="to serve without one")
    _check_admin_options(args)
    if args.warm and (args.no_compile or args.cache_dir == NO_CACHE or args.coordinator):
        raise InputError(
            "--warm compiles programs and keeps them, in one process; it does not go with "
            f"--no-compile, --cache-dir {NO_CACHE} or --coordinator"
        )
    check_engine_options(args)
    _check_web_options(args)


_ADAPTER_SIZES = "max_loras", "max_lora_rank", "max_expert_lora_rank"


def check_engine_options(args: argparse.Namespace) -> None:
    """Refuse what no engine could do.

    Raises:
        InputError: Naming the option and what to give.
    """
    check_share(args.gpu_memory_utilization)
    _check_not_empty(args, "served_model_name")
    check_counts(args, _AT_LEAST_1)
    of_model = options.KV_CACHE_DTYPE, options.DTYPE, options.ENABLE_LORA
    sizes = {name: getattr(args, name) for name in _ADAPTER_SIZES}
    with bad_input(rephrase=partial(in_flags, options=(*ENGINE_OPTIONS, *of_model))):
        EngineConfig(**{"batch_size": 2**16, **engine_options(args)})
        check_replicas(args.batch_size, None, args.dp)
        has_adapters = args.enable_lora or bool(args.lora_modules)
        check_adapter_mode(args.mode, has_adapters=has_adapters)
        check_adapter_sizes(is_enabled=has_adapters, **sizes)
        check_cache_dtype(kv_cache_dtype_of(args.kv_cache_dtype), args.dtype)


def _check_not_empty(args: argparse.Namespace, name: str) -> None:
    if getattr(args, name) is not None and not getattr(args, name).strip():
        raise InputError(f"{flag_like(name)} is empty; leave it out for its default")


def _add_keys(keys: list[str], flag: str, variable: str, *, without: str) -> None:
    """Add the key of an environment variable, and refuse keys that no request can have.

    WHY: a variable that is there and empty is a secret that was not found.
    """
    named = [(flag, key) for key in keys]
    if (of_process := os.environ.get(variable)) is not None:
        named.append((variable, of_process))
        keys.append(of_process)
    for name, key in named:
        if not key.strip():
            raise InputError(f"{name} is empty; leave it out {without}")
        if not key.isascii() or not key.isprintable() or key != key.strip():
            raise InputError(
                f"{name} has a letter outside ASCII, a control character or a space at an end, "
                "which clients send in different ways; give another key"
            )


def _check_admin_options(args: argparse.Namespace) -> None:
    _add_keys(
        args.admin_api_key, "--admin-api-key", "DETJAX_ADMIN_API_KEY",
        without="to have no administrator's routes",
    )  # fmt: skip
    if set(args.admin_api_key) & set(args.api_key):
        raise InputError("--admin-api-key is an --api-key as well; give each a key of its own")
    if args.weights_dir and not args.admin_api_key:
        raise InputError(f"--weights-dir {args.weights_dir[0]} needs --admin-api-key")


def _check_web_options(args: argparse.Namespace) -> None:
    _check_not_empty(args, "host")
    check_counts(args, (_STREAM_INTERVAL,))
    if not 0 <= args.port < 2**16:
        raise InputError(f"--port {args.port} must be from 0 to 65535")
    if args.requests_per_key and not args.api_key:
        raise InputError(
            f"--requests-per-key {args.requests_per_key} counts by key, and there is none; give "
            "--api-key too"
        )
    if args.ssl_certfile is None and (args.ssl_keyfile or args.ssl_ca_certs or args.ssl_cert_reqs):
        names = ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs")
        given = next(flag_like(name) for name in names if getattr(args, name))
        raise InputError(f"{given} is of HTTPS; give --ssl-certfile too")
    if args.ssl_cert_reqs and args.ssl_ca_certs is None:
        raise InputError(f"--ssl-cert-reqs {args.ssl_cert_reqs} needs --ssl-ca-certs")
    try:
        web_options(args)
    except ValueError as error:
        raise InputError(f"--allowed-origins {error}") from error
    if args.metrics_without_key and not args.api_key:
        raise InputError("--metrics-without-key needs --api-key; without one nobody needs a key")
    if not args.allowed_origins and (
        args.allowed_methods or args.allowed_headers or args.allow_credentials
    ):
        raise InputError("--allowed-methods and the like need --allowed-origins")
    for option in (_MAX_BODY_MB, _DRAIN_TIMEOUT):
        if not 0 < (value := getattr(args, option.name)) < 1e6:
            raise InputError(f"{option.flag} {value} must be above 0 and below 1,000,000")
    for option in (_REQUESTS_PER_KEY, _REQUEST_TIMEOUT):
        if not 0 <= (value := getattr(args, option.name)) < 1e9:
            raise InputError(f"{option.flag} {value} must be at least 0 and below 10^9")


if __name__ == "__main__":
    end_at_once_by_signals()
    leave(main())
