# SPDX-License-Identifier: Apache-2.0
"""`python -m detjax.serve`: answers over HTTP that do not depend on the server's load.

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
from pathlib import Path
from typing import NoReturn

from detjax import __version__
from detjax.cli.arguments import NO_CACHE
from detjax.cli.errors import BAD_INPUT, OK
from detjax.compilation.source import default_cache_dir
from detjax.engine.config import MODES, SELF_CHECKS, EngineConfig
from detjax.models.hub import check_model
from detjax.models.tokenizer import read_template_file
from detjax.parallel.job_spec import JobSpec, find_job
from detjax.proof.signing import SigningKey
from detjax.server.options import (
    ACCESS_LOG,
    LOG_LEVELS,
    access_filter,
    engine_options,
    texts_of_option,
)

EXAMPLES = """\
examples:
  python -m detjax.serve
  python -m detjax.serve --model meta-llama/Llama-3.1-8B-Instruct --tp 2 --api-key "$KEY"
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
       -d '{"model": "novels-6m", "prompt": "The old house by the sea"}'

Every answer carries `system_fingerprint`, and in each choice a `detjax` object with the digest of
its token ids and float32 logprobs: the same request has the same digest under any load, at any
batch size, on any mesh. exit codes: 0 stopped, 1 the job of several
processes has ended, 2 something given cannot be done, 130 and 143 SIGINT and SIGTERM before it was
ready
"""


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m detjax.serve",
        description=(__doc__ or "").split("\n\n")[0],
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"detjax {__version__}")
    model = parser.add_argument_group("model")
    model.add_argument("--model", default="novels-6m", metavar="DIR_OR_ID",
                       help="a folder in Hugging Face format, or an id (default: the small model "
                       "that comes with detjax)")  # fmt: skip
    model.add_argument("--revision", help="branch, tag or commit of an id")
    model.add_argument("--served-model-name", metavar="NAME",
                       help="what clients ask for (default: the last part of --model)")  # fmt: skip
    model.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16",
                       help="of weights and compute; it chooses bits")  # fmt: skip
    model.add_argument("--cast-weights", choices=("none", "bfloat16"), default="none",
                       help="round a checkpoint of float16; it chooses bits")  # fmt: skip
    model.add_argument("--generation-config", choices=("auto", "none"), default="auto",
                       help="auto: sampling that a request leaves out is that of the model's "
                       "generation_config.json, but for its number of tokens")  # fmt: skip
    model.add_argument("--chat-template", metavar="FILE",
                       help="a Jinja template of conversations (default: that of the model)"
                       )  # fmt: skip
    engine = parser.add_argument_group("engine (changes no bit of a deterministic answer)")
    engine.add_argument("--mode", choices=MODES, default="invariant",
                        help="fast makes no claim, and refuses deterministic requests")  # fmt: skip
    engine.add_argument("--backend", choices=("auto", "portable", "sm90"), default="auto")
    engine.add_argument(
        "--tp", "--tensor-parallel-size", type=int, default=1, help="GPUs that share each layer"
    )
    engine.add_argument("--dp", type=int, default=1, help="replicas")
    engine.add_argument(
        "--max-len", "--max-model-len", type=int, help="most tokens of a prompt and its answer"
    )
    engine.add_argument(
        "--batch-size", "--max-num-seqs", type=int, help="sequences that run at once"
    )
    engine.add_argument("--decode-batches", type=int, nargs="+", metavar="N",
                        help="smaller batches that a decode step is compiled for, too")  # fmt: skip
    engine.add_argument("--max-num-batched-tokens", type=int, default=8192, metavar="N",
                        help="on a GPU, prompt tokens that are computed between two decode steps "
                        "while prompts wait: more make first tokens sooner and throughput higher, "
                        "fewer make streams steadier (default: %(default)s)")  # fmt: skip
    engine.add_argument("--max-waiting", type=int, default=4096,
                        help="sequences that may wait; more are answered with 429")  # fmt: skip
    engine.add_argument("--kv-memory", "--gpu-memory-utilization", type=float, metavar="SHARE",
                        help="of the GPU's memory, for weights and cache together (default: 0.9); "
                        "not on a CPU")  # fmt: skip
    engine.add_argument("--self-check", choices=SELF_CHECKS, default="always",
                        help="start: compare each program with prefill when it is compiled; "
                        "always: also some answers while idle")  # fmt: skip
    engine.add_argument("--no-compile", action="store_true",
                        help="compile a program when a request first needs it, while all "
                        "requests wait; the log and /health say so")  # fmt: skip
    engine.add_argument("--cache-dir", default=default_cache_dir(), metavar="DIR",
                        help="where compiled programs are kept, so that the next start is quick; "
                        f"{NO_CACHE} keeps none (default: %(default)s)")  # fmt: skip
    engine.add_argument("--warm", action="store_true",
                        help="compile all that requests can need, keep it, and end")  # fmt: skip
    job = parser.add_argument_group("several processes, started alike but for --process-id")
    job.add_argument("--coordinator", metavar="HOST:PORT",
                     help="where process 0, which serves, waits for the others (default: as SLURM "
                     "or Kubernetes say, else one process)")  # fmt: skip
    job.add_argument("--num-processes", type=int, help="they share --dp times --tp devices")
    job.add_argument("--process-id", type=int, metavar="I", help="from 0")
    http = parser.add_argument_group("server")
    http.add_argument("--host", default="127.0.0.1", help="0.0.0.0 is every interface")
    http.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    http.add_argument("--api-key", action="append", default=[], metavar="KEY",
                      help="may be repeated; also DETJAX_API_KEY; none: all may ask")  # fmt: skip
    http.add_argument("--admin-api-key", action="append", default=[], metavar="KEY",
                      help="for weights, sleep and pause; may be repeated; also "
                      "DETJAX_ADMIN_API_KEY; none: there are no such routes")  # fmt: skip
    http.add_argument("--weights-dir", action="append", default=[], metavar="DIR",
                      help="where POST /update_weights_from_disk may read; may be repeated"
                      )  # fmt: skip
    http.add_argument("--metrics-without-key", action="store_true",
                      help="let anybody read /metrics")  # fmt: skip
    http.add_argument("--sign", metavar="KEY",
                      help="sign receipts with this ed25519 key, a PEM file")  # fmt: skip
    http.add_argument("--max-body-mb", type=float, default=8.0, help="of a request")
    http.add_argument("--requests-per-key", type=int, default=0, metavar="N",
                      help="requests of a key at once; 0 sets no limit")  # fmt: skip
    http.add_argument("--request-timeout", type=float, default=0.0, metavar="SECONDS",
                      help="an answer that takes longer is given up; 0 sets no limit")  # fmt: skip
    http.add_argument("--stream-interval", type=int, default=1, metavar="N",
                      help="tokens of an answer in an event of its stream; the first goes at once. "
                      "More cost the host less (default: 1)")  # fmt: skip
    http.add_argument("--log-prompts", action="store_true",
                      help="write the text of prompts to the log; without it no text of anybody "
                      "is there")  # fmt: skip
    http.add_argument("--drain-timeout", type=float, default=30.0, metavar="SECONDS",
                      help="what open answers have after SIGTERM")  # fmt: skip
    http.add_argument("--log-level", "--uvicorn-log-level", choices=LOG_LEVELS, default="info",
                      help="least level of what is logged; a request's line is info")  # fmt: skip
    http.add_argument("--disable-uvicorn-access-log", action="store_true",
                      help="log no line for a request")  # fmt: skip
    http.add_argument("--disable-access-log-for-endpoints", default="", metavar="PATHS",
                      help="log no line for requests of these paths, such as "
                      "/health/ready,/metrics")  # fmt: skip
    _add_browser_options(parser)
    return parser


def _add_browser_options(parser: argparse.ArgumentParser) -> None:
    tls = parser.add_argument_group("HTTPS")
    tls.add_argument("--ssl-keyfile", metavar="FILE", help="of the certificate, PEM")
    tls.add_argument("--ssl-certfile", metavar="FILE", help="the certificate, PEM")
    tls.add_argument("--ssl-ca-certs", metavar="FILE",
                     help="authorities whose client certificates are taken")  # fmt: skip
    tls.add_argument("--ssl-cert-reqs", type=int, choices=(0, 1, 2), default=0,
                     help="0: clients need no certificate; 1: one that is sent is checked; 2: each "
                     "needs one")  # fmt: skip
    cors = parser.add_argument_group("pages of other origins (CORS)")
    for name, what in (
        ("origins", "pages of these may ask, such as https://a.example; * is all (default: none)"),
        ("methods", "that they may ask with"),
        ("headers", "that they may send"),
    ):
        cors.add_argument(f"--allowed-{name}", nargs="+", metavar="TEXT", action="extend",
                          type=texts_of_option, help=f"{what}; or a list as JSON")  # fmt: skip
    cors.add_argument("--allow-credentials", action="store_true", help="cookies and the like")


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT."""
    parser = make_parser()
    args = parser.parse_args(argv)
    check_options(parser, args)
    try:
        job = None if args.warm else find_job(args.coordinator, args.num_processes, args.process_id)
        serves = not args.warm and (job is None or job.process_id == 0)
        with listen(args.host, args.port) if serves else contextlib.nullcontext() as listener:
            check_files(args)
            return _start(args, job, listener)
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT


def _start(args: argparse.Namespace, job: JobSpec | None, listener: socket.socket | None) -> int:
    """Import JAX, and do what is asked for; `listener` is of the process that serves."""
    try:
        from detjax.server.job import follow_server
        from detjax.server.server import open_llm, serve, warm
    except ImportError as error:
        raise ImportError(f'{error}; pip install "detjax[serve]"') from error
    if args.warm:
        print(warm(args))
        return OK
    if listener is None:
        assert job is not None
        return follow_server(args, job, open_llm)
    _log_to_stderr(args)
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
    except OSError as error:
        listener.close()
        raise OSError(
            f"--host {host} --port {port}: {error.strerror}; give another, or --port 0 for any"
        ) from error
    return listener


def check_files(args: argparse.Namespace) -> None:
    """Refuse a key, a template and a model that are not there, before JAX is imported.

    Raises:
        ValueError, OSError: Naming what it was.
    """
    if args.sign is not None:
        try:
            SigningKey(Path(args.sign))
        except OSError as error:
            raise OSError(f"--sign {args.sign} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"--sign: {error}") from error
    if args.chat_template is not None:
        try:
            read_template_file(Path(args.chat_template))
        except ValueError as error:
            raise ValueError(f"--chat-template: {error}") from error
    for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
        if (path := getattr(args, name)) is not None and not Path(path).is_file():
            raise FileNotFoundError(f"--{name.replace('_', '-')} {path} is no file")
    if args.ssl_certfile is not None:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
                args.ssl_certfile, args.ssl_keyfile
            )
        except (ssl.SSLError, OSError) as error:
            raise ValueError(
                f"--ssl-certfile {args.ssl_certfile} with --ssl-keyfile {args.ssl_keyfile}: {error}"
            ) from error
    check_model(args.model, revision=args.revision)


def _log_to_stderr(args: argparse.Namespace) -> None:
    # WHY: a handler of its own, as libraries that load later replace those of the root logger.
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    # The second says what is compiled while requests wait.
    for name in ("detjax.server", "detjax.engine.running.model_runner"):
        log = logging.getLogger(name)
        log.handlers, log.propagate = [handler], False
        log.setLevel(args.log_level.upper())
    logging.getLogger(ACCESS_LOG).addFilter(access_filter(args))


def check_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse what no server could do, before a model is loaded."""
    if key := os.environ.get("DETJAX_API_KEY"):
        args.api_key.append(key)
    if any(not key.strip() for key in args.api_key):
        parser.error("--api-key is empty; leave it out to serve without one")
    _check_admin_options(parser, args)
    if args.warm and (args.no_compile or args.cache_dir == NO_CACHE or args.coordinator):
        parser.error(
            "--warm compiles programs and keeps them, in one process; it does not go with "
            f"--no-compile, --cache-dir {NO_CACHE} or --coordinator"
        )
    if not 0 <= args.port < 2**16:
        parser.error(f"--port {args.port} must be from 0 to 65535")
    if args.kv_memory is not None and not 0 < args.kv_memory <= 1:
        parser.error(f"--kv-memory {args.kv_memory} must be above 0 and at most 1")
    if args.requests_per_key and not args.api_key:
        parser.error(
            f"--requests-per-key {args.requests_per_key} counts by key, and there is none; give "
            "--api-key too"
        )
    if args.ssl_certfile is None and (args.ssl_keyfile or args.ssl_ca_certs or args.ssl_cert_reqs):
        parser.error("--ssl-keyfile and --ssl-ca-certs are of HTTPS; give --ssl-certfile too")
    if args.ssl_cert_reqs and args.ssl_ca_certs is None:
        parser.error(f"--ssl-cert-reqs {args.ssl_cert_reqs} needs --ssl-ca-certs")
    if not args.allowed_origins and (
        args.allowed_methods or args.allowed_headers or args.allow_credentials
    ):
        parser.error("--allowed-methods and the like need --allowed-origins")
    for name in ("host", "served_model_name"):
        if getattr(args, name) is not None and not getattr(args, name).strip():
            parser.error(f"--{name.replace('_', '-')} is empty; leave it out for its default")
    for name in (
        "tp", "dp", "max_len", "batch_size", "max_waiting", "stream_interval",
        "max_num_batched_tokens",
    ):  # fmt: skip
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    try:
        EngineConfig(**{"batch_size": 2**16, **engine_options(args)})
    except ValueError as error:
        parser.error(str(error))
    for name in ("max_body_mb", "drain_timeout"):
        if not 0 < getattr(args, name) < 1e6:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} must be above 0")
    for name in ("requests_per_key", "request_timeout"):
        if not 0 <= getattr(args, name) < 1e9:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 0")


def _check_admin_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if key := os.environ.get("DETJAX_ADMIN_API_KEY"):
        args.admin_api_key.append(key)
    if any(not key.strip() for key in args.admin_api_key):
        parser.error("--admin-api-key is empty; leave it out to have no routes of an administrator")
    if set(args.admin_api_key) & set(args.api_key):
        parser.error("--admin-api-key is an --api-key as well; give each a key of its own")
    if args.weights_dir and not args.admin_api_key:
        parser.error(f"--weights-dir {args.weights_dir[0]} needs --admin-api-key")
    for folder in args.weights_dir:
        if not Path(folder).is_dir():
            parser.error(f"--weights-dir {folder} is no folder")


if __name__ == "__main__":
    end_at_once_by_signals()
    leave(main())
