# SPDX-License-Identifier: Apache-2.0
"""Opens the model, listens, and ends well: the life of `python -m detjax.serve`."""

import argparse
import asyncio
import contextlib
import logging
import signal
import socket
from pathlib import Path

import uvicorn

from detjax.llm import LLM
from detjax.serve.app import make_app
from detjax.serve.service import Limits, ServedModel, Service

LOG = logging.getLogger("detjax.serve")


def open_service(args: argparse.Namespace) -> Service:
    """Load the model, allocate the cache, and compile what requests will need.

    Raises:
        ValueError, FileNotFoundError: As `LLM` says.
    """
    llm = LLM(
        args.model,
        revision=args.revision,
        dtype=args.dtype,
        cast_weights=args.cast_weights,
        mode=args.mode,
        backend=args.backend,
        tp=args.tp,
        dp=args.dp,
        max_len=args.max_len,
        batch_size=args.batch_size,
        max_waiting=args.max_waiting,
        self_check=args.self_check,
        # WHY: on a GPU `LLM` lets prompts go first, and here others wait for their next token.
        max_prefill_streak=0,
        gpu_memory_utilization=args.kv_memory,
    )
    LOG.info("%s", llm.config)
    if not args.no_compile:
        llm.engine.compile(lambda what, done, total: LOG.info("compiled %d of %d", done, total))
    config = llm.config
    model = ServedModel(
        name=args.served_model_name or Path(config.name).name,
        engine=llm.engine,
        tokenizer=llm.tokenizer,
        vocab_size=config.model.vocab_size,
        max_len=config.engine.max_len,
        mode=config.engine.mode,
        fingerprint=config.fingerprint,
    )
    limits = Limits(
        body_bytes=int(args.max_body_mb * 2**20),
        requests_per_key=args.requests_per_key,
        request_s=args.request_timeout,
    )
    return Service(model, limits)


async def serve(args: argparse.Namespace) -> None:
    """Serve until a signal, then let open answers end.

    Raises:
        OSError: If the address cannot be listened on. It is taken before the model is loaded.
    """
    listener = listen(args.host, args.port)
    host, port = listener.getsockname()[:2]
    with listener:
        service = await asyncio.to_thread(open_service, args)
        config = uvicorn.Config(
            make_app(service, api_keys=args.api_key), log_config=None, access_log=False,
            timeout_graceful_shutdown=max(1, int(args.drain_timeout)), lifespan="off",
        )  # fmt: skip
        server = _Server(config)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        LOG.info("ready: http://%s:%d serves %s", host, port, service.model.name)
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        LOG.info("draining: %d requests are open", service.num_open)
        if not await service.drain(args.drain_timeout):
            LOG.warning("%d requests did not end in time and are given up", service.num_open)
        server.should_exit = True
        await running
        stopping.cancel()


class _Server(uvicorn.Server):
    """uvicorn without signal handlers of its own: `serve` has them."""

    @contextlib.contextmanager
    def capture_signals(self):
        """Leave them alone."""
        yield


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
        raise OSError(f"--host {host} --port {port}: {error.strerror}") from error
    return listener
