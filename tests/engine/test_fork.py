# SPDX-License-Identifier: Apache-2.0
"""A process that forks while its engine works loses nothing, and the fork is told what it lacks."""

import os
import threading
import time
import warnings

import pytest

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.errors import EngineStoppedError
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.requests.sequence import TokenEvent
from detjax.models.loading import LoadedModel
from detjax.numerics import NumericsProfile
from detjax.testing.dummies import dummy_config, dummy_model

ASKED = Request(prompt_token_ids=tuple(range(20)), sampling=SamplingParams(max_tokens=40))
PATIENCE_S = 60.0


def model() -> LoadedModel:
    config = dummy_config(num_layers=1, hidden_size=64, intermediate_size=128, vocab_size=128)
    return dummy_model(config, profile=NumericsProfile(attention_block=16, attention_split=64))


def forked(does) -> int:
    """The exit status of a fork that does something and ends: 0 if it was refused as it should."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's and JAX's, of threads
        child = os.fork()
    if child == 0:
        status = 1
        try:
            does()
        except EngineStoppedError as error:
            status = 0 if "was forked from" in str(error) else 2
        finally:
            os._exit(status)
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(child, 9)
    os.waitpid(child, 0)
    raise AssertionError("the fork waits for ever")


@pytest.mark.slow
def test_a_fork_is_refused_and_the_parent_goes_on():
    made = Engine(model(), EngineConfig(batch_size=2, prefill_chunk=16, max_len=64))
    (alone,) = made.generate([ASKED])
    digests, begun = [], threading.Event()

    def note(event: TokenEvent) -> bool:
        begun.set()
        return False

    def work() -> None:
        for _ in range(6):
            digests.append(made.generate([ASKED], on_token=note)[0].digest())

    worker = threading.Thread(target=work)
    worker.start()
    assert begun.wait(PATIENCE_S)
    uses = (
        lambda: made.generate([ASKED]),
        lambda: made.add_request((1, 2), ASKED.sampling),
        made.step,
        made.compile,
        lambda: made.load_weights({}, version=1),
    )
    assert [forked(use) for use in uses] == [0] * len(uses)
    worker.join(PATIENCE_S)
    assert digests == [alone.digest()] * 6
