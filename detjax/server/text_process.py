# SPDX-License-Identifier: Apache-2.0
"""`python -m detjax.server.text_process FD`: the process of a `Worker`, which may be killed.

It ends with its parent, with its alarm, or at its bound of memory.
"""

import contextlib
import os
import pickle
import signal
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from detjax.engine.sampling.structured_output import StructuredOutput
from detjax.models.tokenizer import Tokenizer
from detjax.server.text_tasks import TextTask, TextTools


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What a process is told first.

    Attributes:
        tokenizer: Of the model, pickled: 5 MB for 128,000 tokens, made once for all processes.
        vocab_size: Of the model.
        eos_token_ids: Of the model.
        task_s: Seconds that work may take. The parent counts them; this process ends by itself
            after twice as many, should the parent be gone.
        memory_bytes: Address space of the process, where the system bounds it.
        is_judge: Forms are judged: their library is made ready.
    """

    tokenizer: bytes
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    task_s: float
    memory_bytes: int
    is_judge: bool

    def tools(self) -> TextTools:
        """The tools of the model."""
        tokenizer: Tokenizer = pickle.loads(self.tokenizer)
        return TextTools.of(tokenizer, self.vocab_size, self.eos_token_ids)


def serve(connection: Connection) -> None:
    """Read a setup, then work. An answer has a `result`, or says why it is `refused` or a `fault`.

    What ends this process instead, as the bound of memory may, the parent sees by itself.
    """
    setup: Setup = pickle.loads(connection.recv_bytes())
    _bound(setup.memory_bytes)
    tools = setup.tools()
    if setup.is_judge:
        with contextlib.suppress(ValueError):  # said again to whoever asks
            tools.grammars.check(StructuredOutput(kind="regex", spec="a"))
    connection.send_bytes(b"")
    while True:
        frame = connection.recv_bytes()
        signal.setitimer(signal.ITIMER_REAL, 2 * setup.task_s)
        connection.send_bytes(msgspec.msgpack.encode(_answer(pickle.loads(frame), tools)))
        signal.setitimer(signal.ITIMER_REAL, 0)


def _answer(work: TextTask, tools: TextTools) -> dict[str, Any]:
    try:
        return {"result": work.run(tools)}
    except (ValueError, RecursionError) as error:
        return {"refused": str(error)}
    except MemoryError:
        raise
    except Exception as error:
        return {"fault": repr(error)}


def _bound(memory_bytes: int) -> None:
    """Bound the memory, and let the server's own threads go first."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # not every system has it
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        os.nice(10)


if __name__ == "__main__":
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        serve(Connection(int(sys.argv[1])))
