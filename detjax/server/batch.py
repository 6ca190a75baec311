# SPDX-License-Identifier: Apache-2.0
"""The life of `python -m detjax.run_batch`: a server that nobody but one file asks."""

import argparse
import asyncio

from detjax.cli.display import Display
from detjax.server.app import make_app
from detjax.server.batch_file import BatchOutput, answer_all, in_process
from detjax.server.served_model import Limits
from detjax.server.server import open_model
from detjax.server.service import Service

MAX_AT_ONCE = 1024
DRAIN_S = 30.0


async def run_batch(args: argparse.Namespace, output: BatchOutput) -> int:
    """Open the model and answer what is left to answer; how many requests were refused.

    Raises:
        ValueError, FileNotFoundError: As `open_model` does.
        OSError: If answers cannot be written.
    """
    output.open()
    # WHY: a line of a file may be as long as it likes: nobody else waits for it.
    service = Service(None, Limits(body_bytes=2**40))
    service.open(await asyncio.to_thread(open_model, args))
    with Display(is_quiet=args.quiet).progress("answering") as progress:
        refused = await answer_all(
            output.waiting,
            in_process(make_app(service)),
            output,
            at_once=min(MAX_AT_ONCE, args.max_waiting),
            model=service.model.name,
            progress=progress,
        )
    output.put_in_order()
    await service.drain(DRAIN_S)
    return refused
