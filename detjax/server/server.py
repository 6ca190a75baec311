# SPDX-License-Identifier: Apache-2.0
"""Listens, opens the model, and ends well: the life of `python -m detjax.serve`."""

import argparse
import asyncio
import contextlib
import gc
import logging
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import rich.console
import uvicorn

from detjax.cli.errors import OK, bad_input
from detjax.cli.model import keep_compiled_programs
from detjax.cli.options import read_lora_modules
from detjax.defaults import GPU_MEMORY_UTILIZATION
from detjax.diverge.evidence import explain
from detjax.engine.heap import frozen_heap
from detjax.llm import LLM
from detjax.models.adapters.stack import num_adapter_slots
from detjax.models.generation_config import default_sampling
from detjax.parallel.job_spec import JobSpec
from detjax.progress import COMPILE_STAGES, show_progress, show_stages
from detjax.proof.signing import SigningKey
from detjax.server.app import make_app
from detjax.server.heads import BoundedHeads
from detjax.server.job import Leader
from detjax.server.options import engine_options, web_options
from detjax.server.served_adapters import ServedAdapters
from detjax.server.served_model import Limits, ServedModel
from detjax.server.service import Service
from detjax.sizing import prefill_streak

LOG = logging.getLogger("detjax.server")


def open_llm(args: argparse.Namespace, num_processes: int = 1) -> LLM:
    """Load the model, allocate the cache, and compile what requests will need.

    Raises:
        ValueError, FileNotFoundError: As `LLM` says; if an option has no meaning here.
    """
    llm = _load_llm(args, num_processes)
    _make_ready(llm, compiles=not args.no_compile, hashes=num_processes == 1)
    return llm


def _load_llm(args: argparse.Namespace, num_processes: int = 1) -> LLM:
    """Load the model and allocate the cache."""
    keep_compiled_programs(args.cache_dir)
    asked = args.gpu_memory_utilization
    share = GPU_MEMORY_UTILIZATION if asked is None else asked
    console = rich.console.Console(stderr=True)
    LOG.info("loading %s", args.model)
    with show_progress("loading weights", console, LOG.info, in_bytes=True) as progress:
        llm = LLM(
            args.model,
            revision=args.revision,
            dtype=args.dtype,
            cast_weights=args.cast_weights,
            quantized_weights=args.quantized_weights,
            kv_cache_dtype=args.kv_cache_dtype,
            backend=args.backend,
            tp=args.tp,
            dp=args.dp,
            generation_config=args.generation_config,
            chat_template=args.chat_template,
            speculative_config=args.speculative_config,
            enable_lora=args.enable_lora or bool(args.lora_modules),
            max_loras=args.max_loras,
            max_lora_rank=args.max_lora_rank,
            max_expert_lora_rank=args.max_expert_lora_rank,
            # WHY: not so many as `LLM` has: here others wait for their next token.
            max_prefill_streak=prefill_streak(args.max_num_batched_tokens),
            gpu_memory_utilization=share,
            num_processes=num_processes,
            cache_dir=None,
            show_progress=False,
            progress=progress,
            **engine_options(args),
        )
    if asked is not None and llm.config.backend.platform == "cpu":
        raise ValueError(
            f"--gpu-memory-utilization {asked} is a share of a GPU's memory, and this server runs "
            "on the CPU; leave it out, and choose the cache by --batch-size and --max-len"
        )
    LOG.info("%s", llm.config)
    if num_processes == 1:  # the others of a job would have to run the same
        llm.engine.explain_differences(partial(explain, model=llm.model))
    return llm


def _make_ready(llm: LLM, *, compiles: bool, hashes: bool) -> None:
    """Compile programs, and hash weights for the model's identity."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        # WHY: what cannot be hashed on one GPU takes seconds, and compiling does not need it.
        hashing = pool.submit(llm.identity) if hashes else None
        if compiles:
            begin_s = time.perf_counter()
            console = rich.console.Console(stderr=True)
            with show_stages(COMPILE_STAGES, console, LOG.info) as (compiled, checked):
                llm.engine.compile(compiled, checked=checked)
            LOG.info("compiled and checked in %.1f s", time.perf_counter() - begin_s)
        if hashing is not None:
            hashing.result()


def warm(args: argparse.Namespace) -> str:
    """Compile what requests can need, and return a table of when each program was ready.

    Raises:
        ValueError, FileNotFoundError: As `open_llm` says.
    """
    args.no_compile, begin_s = True, time.perf_counter()
    llm = open_llm(args)
    lines = [f"{'program':<60} ready after, s"]
    console = rich.console.Console(stderr=True)
    with show_stages(COMPILE_STAGES, console, LOG.info) as (show, checked):

        def compiled(what: str, done: int, total: int) -> None:
            lines.append(f"{what:<60} {time.perf_counter() - begin_s:.2f}")
            show(what, done, total)

        llm.engine.compile(compiled, checked=checked)
    return "\n".join([*lines, f"{len(lines) - 1} programs"])


def open_model(args: argparse.Namespace, leader: Leader | None = None) -> ServedModel:
    """Open the model, with the other processes if this is process 0 of a job.

    Raises:
        ValueError, FileNotFoundError: As `open_llm` and `Leader.open` say.
    """
    key = None if args.sign is None else SigningKey(Path(args.sign))
    llm = _load_llm(args) if leader is None else leader.open(args, open_llm)
    config = llm.config
    name = args.served_model_name or Path(config.name).name
    engine = llm.engine if leader is None else leader.engine
    adapters = None
    if num_adapter_slots(llm.model):  # no job has any
        adapters = ServedAdapters(engine, name)
        for adapter_name, folder in read_lora_modules(args.lora_modules).items():
            with bad_input(f"--lora-modules {adapter_name}: "):
                adapters.load(adapter_name, folder)
    if leader is None:
        # WHY: now, as an adapter that is refused must not cost minutes of compiling.
        _make_ready(llm, compiles=not args.no_compile, hashes=True)
    defaults = default_sampling(config.folder) if args.generation_config == "auto" else {}
    # OpenAI's API has a number of tokens of its own.
    defaults.pop("max_tokens", None)
    if defaults:
        LOG.info("sampling that a request leaves out (generation_config.json): %s", defaults)
    return ServedModel(
        name=name,
        engine=engine,
        adapters=adapters,
        tokenizer=llm.tokenizer,
        vocab_size=config.model.vocab_size,
        max_len=config.engine.max_len,
        mode=config.engine.mode,
        fingerprint=config.fingerprint,
        identity=llm.identity(),
        identify=llm.identity,
        end_token_ids=config.model.eos_token_ids,
        signing_key=key,
        default_sampling=defaults,
    )


def make_limits(args: argparse.Namespace) -> Limits:
    """What the server takes."""
    return Limits(
        body_bytes=int(args.max_body_mb * 2**20),
        requests_per_key=args.requests_per_key,
        request_s=args.request_timeout,
        stream_interval=args.stream_interval,
        logs_prompts=args.log_prompts,
        max_held=args.max_waiting,
    )


async def serve(
    args: argparse.Namespace, listener: socket.socket, job: JobSpec | None = None
) -> int:
    """Serve until a signal, then let open answers end. `/health` answers while the model loads.

    Args:
        args: The options.
        listener: Bound to the address.
        job: Of which this is process 0; None is one process.

    Returns:
        The exit code.

    Raises:
        ValueError, FileNotFoundError: As `open_model` does.
    """
    leader = None if job is None else Leader(job)
    host, port = listener.getsockname()[:2]
    with listener:
        service = Service(None, make_limits(args))
        config = uvicorn.Config(
            make_app(service, web_options(args)), log_config=None, access_log=False,
            http=BoundedHeads, timeout_graceful_shutdown=1, lifespan="off",
            ssl_keyfile=args.ssl_keyfile, ssl_certfile=args.ssl_certfile,
            ssl_ca_certs=args.ssl_ca_certs, ssl_cert_reqs=args.ssl_cert_reqs,
        )  # fmt: skip
        where = f"[{host}]" if ":" in host else host
        url = f"{'https' if args.ssl_certfile else 'http'}://{where}:{port}"
        server = _Server(config)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        while not (server.started or running.done()):
            await asyncio.sleep(0.01)
        LOG.info("starting: %s", url)
        try:
            service.open(await asyncio.to_thread(open_model, args, leader))
        except BaseException:
            server.should_exit = True
            await running
            raise
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        if leader is not None:
            leader.attend(service, stop.set)
        gc.collect()
        LOG.info("ready: %s serves %s", url, service.model.name)
        stopping = asyncio.create_task(stop.wait())
        with frozen_heap():
            await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        LOG.info("draining: %d requests are open", service.num_open)
        if num_given_up := await service.drain(args.drain_timeout):
            LOG.warning("%d requests did not end in time and are given up", num_given_up)
        server.should_exit = True
        await running
        stopping.cancel()
        return OK if leader is None else await asyncio.to_thread(leader.close)


class _Server(uvicorn.Server):
    """uvicorn without signal handlers of its own: `serve` has them."""

    @contextlib.contextmanager
    def capture_signals(self):
        """Leave them alone."""
        yield
